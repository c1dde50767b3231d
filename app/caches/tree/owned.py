"""Which ids of one pool a tree holds: the guard against an id in two places, which one would free and another read."""

from __future__ import annotations

import numpy as np

from app.errors import ForeignPageError, OwnershipError


class OwnedIds:
    """A bitmap over the ids 1..capacity. What a call costs depends on the ids named, not on the size of the pool.

    To see an id named twice, each gets its place in the call: places are written and read back, and one that was
    overwritten shows. Nothing else reads them, so they are never cleared.
    """

    __slots__ = ("_counting", "_kind", "_owned", "_places")

    def __init__(self, capacity: int, kind: str) -> None:
        """`kind`: what the ids name, in words for an error: "page"."""
        self._owned = np.zeros(capacity + 1, np.bool_)
        self._owned[0] = True  # padding, or the state of no tokens: nobody's, never to be adopted
        self._places = np.empty(capacity + 1, np.int32)
        self._counting = np.arange(capacity + 1, dtype=np.int32)
        self._kind = kind

    def adoptable(self, ids: np.ndarray) -> np.ndarray:
        """`ids`, (n,) int32, for `adopt`. OwnershipError if one of them is here already. Changes nothing."""
        index = ids.astype(np.intp)  # once: numpy would do it for each use
        try:
            taken = self._owned.take(index)
        except IndexError:
            raise ForeignPageError(pages=tuple(ids.tolist()), capacity=self._owned.size - 1) from None
        if b"\x01" in taken.tobytes():  # quicker than `any`
            raise OwnershipError(
                pages=tuple(ids[taken].tolist()), reason=f"{self._kind}: cached already under other tokens, or padding"
            )
        return index

    def adoptable_once(self, ids: np.ndarray) -> np.ndarray:
        """The same; OwnershipError also if one of them is named twice."""
        index = self.adoptable(ids)
        if self._names_one_twice(index):
            named, times = np.unique(ids, return_counts=True)
            raise OwnershipError(pages=tuple(named[times > 1].tolist()), reason=f"{self._kind}: given for two places")
        return index

    def adopt(self, adoptable: np.ndarray) -> None:
        """What `adoptable` returned is the tree's from now on."""
        self._owned[adoptable] = True

    def release(self, ids: np.ndarray) -> None:
        """`ids` are the tree's no more."""
        self._owned[ids.astype(np.intp)] = False

    def clear(self) -> None:
        """None is. O(capacity)."""
        self._owned[1:] = False

    def ids(self) -> np.ndarray:
        """(n,) the ids held, ascending. O(capacity); for checks."""
        return np.flatnonzero(self._owned[1:]) + 1

    def _names_one_twice(self, index: np.ndarray) -> bool:
        if index.size < 2:
            return False
        places = self._counting[: index.size]
        if places.size < index.size:
            return True
        self._places[index] = places
        return self._places.take(index).tobytes() != places.tobytes()
