"""A disk that fails when it is told to, at the calls of its storage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from app.hicache.storage.base import Parts
from app.hicache.storage.disk import Disk


class Crashed(BaseException):
    """The process dies here: nothing of it runs any more."""


def _nothing() -> None:
    return None


class FaultyDisk(Disk):
    """Fails at the next call of a name, at each, or dies at it. A write that fails leaves half a file."""

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._always: dict[str, int] = {}
        self._dying: str | None = None
        self.num_failed = 0
        self.before_rename: Callable[[], object] = _nothing

    def fail_next(self, call: str, number: int) -> None:
        """`number`: of the system's errors."""
        self._next[call] = number

    def fail_always(self, call: str, number: int) -> None:
        self._always[call] = number

    def die_at(self, call: str) -> None:
        self._dying = call

    def mend(self) -> None:
        self._next.clear()
        self._always.clear()
        self._dying = None

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """No faults meanwhile; those that were to come still come after it."""
        kept, self._next = self._next, {}
        yield
        self._next = kept

    def write(self, path: Path, parts: Parts) -> None:
        number = self._fault("write")
        if number is not None or self._dying == "write":
            whole = b"".join(parts)
            path.write_bytes(whole[: len(whole) // 2])
        self._raise("write", number)
        super().write(path, parts)

    def read(self, path: Path) -> bytes:
        self._raise("read", self._fault("read"))
        return super().read(path)

    def rename(self, source: Path, target: Path) -> None:
        self.before_rename()
        self._raise("rename", self._fault("rename"))
        super().rename(source, target)
        self._raise("after rename", None)

    def remove(self, path: Path) -> None:
        # Only values: the removal of a temporary file is no call that a test would count.
        if path.suffix == ".kv":
            self._raise("remove", self._fault("remove"))
        elif self._dying is not None:
            raise Crashed
        super().remove(path)
        if path.suffix == ".kv":
            self._raise("after remove", None)

    def size(self, path: Path) -> int:
        self._raise("size", self._fault("size"))
        return super().size(path)

    def _fault(self, call: str) -> int | None:
        return self._next.pop(call, self._always.get(call))

    def _raise(self, call: str, number: int | None) -> None:
        if self._dying == call:
            raise Crashed
        if number is not None:
            self.num_failed += 1
            raise OSError(number, os.strerror(number))
