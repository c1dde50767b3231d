"""How many bytes and values a folder holds, counted once for all processes that use it.

Whoever adds or removes a value holds the ledger's lock meanwhile and writes the new figures before letting go. A mark
is set for that time; one that is found set was left by a process that died in between, and the folder is counted anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from app.hicache.storage.base import Deadline, has_passed, remaining_s

_MAGIC = b"TPUKVL01"
_LAYOUT = struct.Struct("<8sQQQQ")
_MARK = struct.Struct("<Q")
_MARK_AT = _LAYOUT.size - _MARK.size
_POLL_S = 0.0005


@dataclass(slots=True)
class Totals:
    """What is in the folder. Whoever holds the lock edits it."""

    num_bytes: int = 0
    num_values: int = 0
    changes: int = 0  # values ever added or removed, by anybody
    is_known: bool = False  # false in a new ledger, and where a process died while it held the lock

    def added(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.num_values += 1
        self.changes += 1

    def removed(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes
        self.num_values -= 1
        self.changes += 1


class DirectoryLedger:
    """The ledger file of one folder. Its lock is between threads as well as between processes, and not re-entrant."""

    def __init__(self, path: Path) -> None:
        """Makes the file if there is none. OSError where that cannot be done."""
        self._path = path
        self._threads = threading.Lock()
        # A file object, because it lets go of the lock when nobody refers to it any more.
        self._file = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "rb+", buffering=0)  # noqa: SIM115

    @contextlib.contextmanager
    def locked(self, deadline: Deadline) -> Iterator[Totals]:
        """Hold the lock. What the body makes of the totals is written at its end, unless it raises.

        An OSError of the body is no such case: the totals have what was done before it. Raises TimeoutError past the
        deadline, and FileNotFoundError where the file is no longer the folder's.
        """
        if not self._threads.acquire(timeout=min(remaining_s(deadline), threading.TIMEOUT_MAX)):
            raise self._busy()
        try:
            if not self.is_in_place():
                raise FileNotFoundError(errno.ENOENT, "the ledger is gone", str(self._path))
            self._lock_processes(deadline)
            try:
                totals = self._read()
                os.pwrite(self._file.fileno(), _MARK.pack(1), _MARK_AT)
                try:
                    yield totals
                except OSError:
                    self._write(totals)
                    raise
                self._write(totals)
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._threads.release()

    def is_in_place(self) -> bool:
        """Whether the file is open and still the folder's."""
        try:
            return not self._file.closed and os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except OSError:
            return False

    def close(self) -> None:
        """Waits for the thread that holds the lock."""
        with self._threads:
            self._file.close()

    def _busy(self) -> TimeoutError:
        return TimeoutError(errno.ETIMEDOUT, "another process or thread holds the lock", str(self._path))

    def _lock_processes(self, deadline: Deadline) -> None:
        # Polled: a lock that waits in the system cannot be given a deadline, and its owner may be stopped for good.
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if has_passed(deadline):
                    raise self._busy() from None
                time.sleep(_POLL_S)

    def _read(self) -> Totals:
        raw = os.pread(self._file.fileno(), _LAYOUT.size, 0)
        if len(raw) < _LAYOUT.size:
            return Totals()
        magic, num_bytes, num_values, changes, mark = _LAYOUT.unpack(raw)
        return Totals(num_bytes, num_values, changes, is_known=magic == _MAGIC and not mark)

    def _write(self, totals: Totals) -> None:
        raw = _LAYOUT.pack(_MAGIC, totals.num_bytes, totals.num_values, totals.changes, int(not totals.is_known))
        os.pwrite(self._file.fileno(), raw, 0)
