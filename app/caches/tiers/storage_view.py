"""What control believes about the storage that is attached: how its keys begin, and what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from app.caches.base import EventSink
from app.caches.tiers.chain_hashes import ChainHashes
from app.caches.tiers.recent_keys import RecentKeys
from app.caches.tiers.storage_events import StorageEvents
from app.core.keys import Namespace, RadixKey
from app.core.transfers import OfEachPool, PageKeys

_MAX_KNOWN = 1 << 16  # keys of each pool
_MAX_SEEDS = 1024

Seed = Callable[[Namespace], bytes]


class StorageView:
    """Keys of one storage at a time. `epoch` grows when it is another one, or the same one was emptied.

    known: keys that are there, or on their way there; not all of them.
    """

    def __init__(self, seed: Seed | None, page_size: int, events: EventSink | None = None) -> None:
        """seed: what starts a namespace's chain of keys; None where nothing is attached."""
        self.epoch = 0
        self.known = OfEachPool(RecentKeys(_MAX_KNOWN), RecentKeys(_MAX_KNOWN), RecentKeys(_MAX_KNOWN))
        self._seed = _remembered(seed)
        self._chains = ChainHashes(page_size)
        self._events = StorageEvents(events, page_size)

    @property
    def is_attached(self) -> bool:
        return self._seed is not None

    def attach(self, seed: Seed | None) -> None:
        self._seed = _remembered(seed)
        self.forget()

    def forget(self) -> None:
        """Nothing is known to be there."""
        self.epoch += 1
        for keys in self.known:
            keys.clear()
        self._events.cleared()

    def hashes(self, key: RadixKey, first: int, end: int, parent: bytes | None = None) -> list[bytes]:
        """Of pages first .. end - 1 of the key, while a storage is attached. parent: of the one before, if known."""
        assert self._seed is not None, "nothing is asked of a storage that is not there"
        return self._chains.of(self._seed(key.namespace), key, first, end, parent)

    def hash_before(self, key: RadixKey, first: int) -> bytes | None:
        """Of the page before page `first`; None where it starts the key. O(1) after `hashes` from there."""
        assert self._seed is not None, "nothing is asked of a storage that is not there"
        return self._chains.before(self._seed(key.namespace), key, first)

    @property
    def has_listener(self) -> bool:
        return self._events.has_listener

    def tell(
        self, key: RadixKey, first: int, hashes: Sequence[bytes], there: Sequence[bool | None], parent: bytes | None
    ) -> None:
        """To the listener, see StorageEvents."""
        self._events.answered(key, first, hashes, there, parent)

    def learn(self, asked: PageKeys, there: OfEachPool[np.ndarray]) -> None:
        """For each of these keys, (n,) bool of each pool, whether it is there."""
        for known, keys, flags in zip(self.known, asked, there, strict=True):
            known.add(key for key, flag in zip(keys, flags, strict=True) if flag)
            known.discard(key for key, flag in zip(keys, flags, strict=True) if not flag)

    def suppose(self, keys: PageKeys) -> None:
        """They are on their way there."""
        for known, of_pool in zip(self.known, keys, strict=True):
            known.add(of_pool)

    def doubt(self, keys: PageKeys) -> None:
        """They are not there after all."""
        for known, of_pool in zip(self.known, keys, strict=True):
            known.discard(of_pool)


def _remembered(seed: Seed | None) -> Seed | None:
    return None if seed is None else lru_cache(_MAX_SEEDS)(seed)
