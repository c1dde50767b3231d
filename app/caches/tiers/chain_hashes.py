"""Storage keys of pages in the middle of a prefix, without hashing page by page from the root each time."""

from __future__ import annotations

from collections import OrderedDict

import blake3

from app.core.keys import TOKEN_BYTES, RadixKey, page_hashes

_MAX_REMEMBERED = 4096


class ChainHashes:
    """`page_hashes` under one seed, which remembers where recent chains ended.

    A conversation that grows by a page at a time is hashed from where it ended. What is before costs one hash over its
    bytes, not one a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._ends: OrderedDict[tuple[bytes, bytes], bytes] = OrderedDict()  # (seed, digest of tokens) -> last hash

    def of(self, seed: bytes, key: RadixKey, first: int, end: int, parent: bytes | None = None) -> list[bytes]:
        """The hashes of pages first .. end - 1 of the key. O(bytes before `end`) + O(pages from `first` on).

        parent: the hash of the page before `first`, for who knows it.
        """
        step = self._page_size * TOKEN_BYTES
        above = parent or self.before(seed, key, first) or seed
        hashes = page_hashes(above, key.raw[first * step : end * step], self._page_size)
        if hashes:
            self._remember(seed, key.raw[: end * step], hashes[-1])
        return hashes

    def before(self, seed: bytes, key: RadixKey, first: int) -> bytes | None:
        """The hash of the page before page `first`; None where it starts the key. Cost as of `of`."""
        if first == 0:
            return None
        raw = key.raw[: first * self._page_size * TOKEN_BYTES]
        known = self._ends.get((seed, _digest(raw)))
        if known is None:
            known = page_hashes(seed, raw, self._page_size)[-1]
            self._remember(seed, raw, known)
        return known

    def _remember(self, seed: bytes, raw: bytes, last: bytes) -> None:
        place = seed, _digest(raw)
        self._ends[place] = last
        self._ends.move_to_end(place)
        if len(self._ends) > _MAX_REMEMBERED:
            self._ends.popitem(last=False)


def _digest(raw: bytes) -> bytes:
    return blake3.blake3(raw).digest()
