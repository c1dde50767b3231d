"""Storages that go wrong, around one that does not. They ship, so that anyone may try what a fault does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from app.core.keys import StorageIdentity
from app.hicache.storage.base import Capabilities, Deadline, Got, HiCacheStorage, Outcome, PageKey, Parts, Usage
from app.hicache.storage.value import HEADER_BYTES, ValueCodec


class StorageDouble:
    """Passes every call on. A double overrides what it gets wrong; `_enter` runs before each call."""

    def __init__(self, inner: HiCacheStorage) -> None:
        self._inner = inner

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    def exists(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        self._enter(deadline)
        return self._inner.exists(keys, deadline)

    def get(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Got]:
        self._enter(deadline)
        return self._inner.get(keys, deadline)

    def set(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        self._enter(deadline)
        return self._inner.set(values, deadline)

    def delete(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        self._enter(deadline)
        return self._inner.delete(keys, deadline)

    def clear(self, deadline: Deadline) -> int:
        return self._inner.clear(deadline)

    def usage(self) -> Usage | None:
        return self._inner.usage()

    def close(self) -> None:
        self._inner.close()

    def check_integrity(self) -> None:
        self._inner.check_integrity()

    def _enter(self, deadline: Deadline) -> None:
        """Before each call for keys."""


class LateStorage(StorageDouble):
    """Answers a call only when `num_calls` more have come in, or after `release`."""

    def __init__(self, inner: HiCacheStorage, num_calls: int) -> None:
        super().__init__(inner)
        self._num_calls = num_calls
        self._arrived = threading.Condition()
        self._num_arrived = 0
        self._is_released = False

    def release(self) -> None:
        with self._arrived:
            self._is_released = True
            self._arrived.notify_all()

    def _enter(self, deadline: Deadline) -> None:
        with self._arrived:
            self._num_arrived += 1
            awaited = self._num_arrived + self._num_calls
            self._arrived.notify_all()
            self._arrived.wait_for(lambda: self._is_released or self._num_arrived >= awaited)


class SilentStorage(StorageDouble):
    """Never answers, whatever the deadline, until `release`. `called` is set when a call hangs."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self.called = threading.Event()
        self._released = threading.Event()

    def release(self) -> None:
        self._released.set()

    def _enter(self, deadline: Deadline) -> None:
        self.called.set()
        self._released.wait()


class SlowStorage(StorageDouble):
    """Takes `seconds` longer for each call."""

    def __init__(self, inner: HiCacheStorage, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def _enter(self, deadline: Deadline) -> None:
        time.sleep(self._seconds)


class FailingStorage(StorageDouble):
    """Fails while `num_failures` is above 0, by one less each time; the outcome of every key is `outcome` then."""

    def __init__(self, inner: HiCacheStorage, num_failures: int, outcome: Outcome = Outcome.FAULT) -> None:
        super().__init__(inner)
        self.num_failures = num_failures
        self.num_calls = 0
        self._outcome = outcome
        self._lock = threading.Lock()

    def exists(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        return [self._outcome] * len(keys) if self._fails() else super().exists(keys, deadline)

    def get(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Got]:
        return [Got(self._outcome)] * len(keys) if self._fails() else super().get(keys, deadline)

    def set(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        return [self._outcome] * len(values) if self._fails() else super().set(values, deadline)

    def delete(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        return [self._outcome] * len(keys) if self._fails() else super().delete(keys, deadline)

    def _fails(self) -> bool:
        with self._lock:
            self.num_calls += 1
            fails = self.num_failures > 0
            self.num_failures -= fails
            return fails


class RaisingStorage(StorageDouble):
    """A backend that breaks the contract: every call for keys raises."""

    def _enter(self, deadline: Deadline) -> None:
        raise OSError("this backend raises")


class FullStorage(StorageDouble):
    """Has room for nothing more."""

    def set(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        return [Outcome.FULL] * len(values)


class CorruptStorage(StorageDouble):
    """Gives `damage(value)` instead of the value."""

    def __init__(self, inner: HiCacheStorage, damage: Callable[[bytes], bytes]) -> None:
        super().__init__(inner)
        self._damage = damage

    def get(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Got]:
        found = super().get(keys, deadline)
        return [got if got.value is None else got._replace(value=self._damage(bytes(got.value))) for got in found]


def flipped_bit(value: bytes) -> bytes:
    """One bit of the payload is another one."""
    return value[:-1] + bytes([value[-1] ^ 0x10])


def cut(value: bytes) -> bytes:
    return value[:-1]


def lengthened(value: bytes) -> bytes:
    return value + b"\x00"


def of_another_model(identity: StorageIdentity, key: PageKey) -> Callable[[bytes], bytes]:
    """The same payload, as a server with another identity would have written it."""

    def damage(value: bytes) -> bytes:
        payload = value[HEADER_BYTES:]
        return b"".join(ValueCodec(identity, len(payload)).encode(key, payload))

    return damage
