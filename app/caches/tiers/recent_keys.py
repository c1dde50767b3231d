"""A bounded memory of keys."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class RecentKeys:
    """The keys that were added or asked for last, `capacity` of them; older ones are forgotten."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        """Asking counts as use."""
        found = key in self._keys
        if found:
            self._keys.move_to_end(key)
        return found

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def discard(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        self._keys.clear()
