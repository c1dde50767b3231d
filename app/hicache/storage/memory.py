"""Values in this process's memory, with a quota. For tests, and for measuring what the rest of the tier costs."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from app.errors import IntegrityError
from app.hicache.storage.base import Capabilities, Deadline, Got, Outcome, PageKey, Parts, Usage, has_passed, size_of


class MemoryStorage:
    """At most `capacity_bytes` of values; the least recently used go first."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[PageKey, bytes] = OrderedDict()
        self._num_bytes = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=False, shared=False, max_value_bytes=self._capacity_bytes)

    def exists(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        if has_passed(deadline):
            return [Outcome.LATE] * len(keys)
        with self._lock:
            return [Outcome.HIT if key in self._values else Outcome.ABSENT for key in keys]

    def get(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Got]:
        if has_passed(deadline):
            return [Got(Outcome.LATE)] * len(keys)
        with self._lock:
            return [self._get(key) for key in keys]

    def set(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        if has_passed(deadline):
            return [Outcome.LATE] * len(values)
        with self._lock:
            return [self._set(key, parts) for key, parts in values]

    def delete(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        if has_passed(deadline):
            return [Outcome.LATE] * len(keys)
        with self._lock:
            return [Outcome.DELETED if self._remove(key) else Outcome.ABSENT for key in keys]

    def clear(self, deadline: Deadline) -> int:
        with self._lock:
            num_removed = len(self._values)
            self._values.clear()
            self._num_bytes = 0
            return num_removed

    def usage(self) -> Usage:
        with self._lock:
            return Usage(self._num_bytes, len(self._values))

    def close(self) -> None:
        """Nothing is held that the system would not take back."""

    def check_integrity(self) -> None:
        with self._lock:
            real = sum(map(len, self._values.values()))
            if not real == self._num_bytes <= self._capacity_bytes:
                raise IntegrityError(
                    owner="MemoryStorage", broken=f"{real} bytes, counted {self._num_bytes} of {self._capacity_bytes}"
                )

    def _get(self, key: PageKey) -> Got:
        value = self._values.get(key)
        if value is None:
            return Got(Outcome.ABSENT)
        self._values.move_to_end(key)
        return Got(Outcome.HIT, value)

    def _set(self, key: PageKey, parts: Parts) -> Outcome:
        num_bytes = size_of(parts)
        if num_bytes > self._capacity_bytes:
            return Outcome.TOO_LARGE
        self._remove(key)
        while self._num_bytes + num_bytes > self._capacity_bytes:
            self._remove(next(iter(self._values)))
        self._values[key] = b"".join(parts)
        self._num_bytes += num_bytes
        return Outcome.STORED

    def _remove(self, key: PageKey) -> bool:
        value = self._values.pop(key, None)
        self._num_bytes -= len(value or b"")
        return value is not None
