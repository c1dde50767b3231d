"""The owner of the free pages of one KV pool, and the face of it that control may see.

A page's life. `free` only records; nothing is handed out again before a prepared batch has applied it:

             allocate                 port.free                apply_frees
    FREE  ------------->  HELD  ------------------->  RECORDED  ----------->  FREE
      ^                     |
      `----- give_back -----'   (a discarded reservation; no step has seen the pages)

The runtime calls the allocator, control calls `allocator.port`; both look at one `_PageBook`, neither calls the other.
Not thread-safe: one thread plans and prepares. Every operation costs O(pages asked), whatever the size of the pool.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from app.core.handles import CacheIdentity
from app.errors import DoubleFreeError, ForeignPageError, IntegrityError, OutOfPagesError, StaleHandleError

# What the book holds for a page. Free and recorded ones differ only by the list they are in. Anything but _HELD is not
# held: when scattered pages are freed, each gets its place in the call, 1..n; places are written and read back, and a
# page named twice shows as a place that was overwritten. No sorting, no second array.
_HELD = 0
_NOT_HELD = 1

_NO_PAGES = np.empty(0, np.int32)


class _PageBook:
    """The state that both faces share.

    state: (capacity + 1,) int32, by page id; page 0 is never held.
    places: (capacity,) int32, 1..capacity.
    stack: (capacity,) int32; the last num_free entries are free. It grows downwards, so that both taking and giving
        back are one forward copy, and a fresh pool hands out consecutive ids.
    recorded: freed pages in order of freeing, (n,) int32 each.
    """

    __slots__ = (
        "capacity", "identity", "num_free", "num_recorded", "page_size", "places", "recorded", "stack", "state",
    )  # fmt: skip

    def __init__(self, capacity: int, page_size: int, identity: CacheIdentity) -> None:
        self.capacity = capacity
        self.page_size = page_size
        self.state = np.empty(capacity + 1, np.int32)
        self.places = np.arange(1, capacity + 1, dtype=np.int32)
        self.stack = np.empty(capacity, np.int32)
        self.clear(identity)

    def clear(self, identity: CacheIdentity) -> None:
        """Everything free. O(capacity)."""
        self.identity = identity
        self.state.fill(_NOT_HELD)
        self.stack[:] = self.places
        self.num_free = self.capacity
        self.num_recorded = 0
        self.recorded: list[np.ndarray] = []

    def is_first_recorded(self, pages: np.ndarray) -> bool:
        """Whether `recorded` begins with these pages: as a rule it is the very array that was given out, sealed."""
        if not self.recorded:
            return False
        first = self.recorded[0]
        return first is pages or np.array_equal(first, pages)

    def free_page_ids(self) -> np.ndarray:
        return self.stack[self.capacity - self.num_free :].copy()

    def mark_held(self, pages: np.ndarray) -> None:
        """For free pages, (n,) int32, n > 0."""
        run = self._run(pages)
        self.state[_index(pages) if run is None else run] = _HELD

    def take_held(self, pages: np.ndarray) -> None:
        """Held pages, (n,) int32, n > 0, stop being held; refuse and change nothing otherwise.

        Arrays are compared as bytes, which is quicker than `==` and `all`.
        """
        run = self._run(pages)
        if run is None:
            self._take_scattered(pages)
            return
        if self.state[run].tobytes() != bytes(pages.nbytes):  # some page is not _HELD
            self._refuse(pages)
        self.state[run] = _NOT_HELD

    def _take_scattered(self, pages: np.ndarray) -> None:
        index = _index(pages)
        places = self.places[: pages.size]
        try:
            before = self.state.take(index)
        except IndexError:
            self._refuse(pages)
        if before.tobytes() != bytes(pages.nbytes) or pages.size > self.capacity:
            self._refuse(pages)
        self.state[index] = places
        if self.state.take(index).tobytes() != places.tobytes():  # some page was named twice
            self.state[index] = _HELD
            self._refuse(pages)

    def _run(self, pages: np.ndarray) -> slice | None:
        """Where `pages` is in `state`, if its ids are consecutive: then nothing needs gathering or scattering."""
        first, last = int(pages[0]), int(pages[-1])
        if last - first != pages.size - 1 or first < 1 or last > self.capacity:
            return None
        return slice(first, last + 1) if pages.tobytes() == self.places[first - 1 : last].tobytes() else None

    def refuse_foreign(self, pages: np.ndarray) -> None:
        """Raise ForeignPageError if a page is not 1..capacity."""
        foreign = (pages < 1) | (pages > self.capacity)
        if foreign.any():
            raise ForeignPageError(pages=tuple(pages[foreign].tolist()), capacity=self.capacity)

    def _refuse(self, pages: np.ndarray) -> NoReturn:
        self.refuse_foreign(pages)
        ids, counts = np.unique(pages, return_counts=True)
        wrong = (counts > 1) | (self.state[ids] != _HELD)
        raise DoubleFreeError(pages=tuple(ids[wrong].tolist()))


class TokenAllocatorPort:
    """Control's face: `TokenAllocator` of core/ports.py. Touches the book only, never the allocator."""

    def __init__(self, book: _PageBook) -> None:
        self._book = book

    @property
    def page_size(self) -> int:
        return self._book.page_size

    @property
    def capacity(self) -> int:
        """Usable pages: ids 1..capacity."""
        return self._book.capacity

    @property
    def identity(self) -> CacheIdentity:
        """The pool that page ids belong to now."""
        return self._book.identity

    def free(self, pages: np.ndarray) -> None:
        """Record held pages, (n,) int32, as given back. ForeignPageError or DoubleFreeError, and no change. O(n)."""
        _require_int32(pages)
        if pages.size == 0:
            return
        book = self._book
        book.take_held(pages)
        book.recorded.append(pages.copy())
        book.num_recorded += pages.size

    def recorded_frees(self) -> np.ndarray:
        """(n,) int32, read-only: pages freed and not yet applied by a prepared batch, in order of freeing."""
        recorded = self._book.recorded
        if not recorded:
            return _NO_PAGES
        if len(recorded) > 1:
            recorded[:] = [np.concatenate(recorded)]
        recorded[0].setflags(write=False)
        return recorded[0]

    def available(self) -> int:
        """Pages that the next prepare may hand out: free ones and recorded ones."""
        return self._book.num_free + self._book.num_recorded

    def free_page_ids(self) -> np.ndarray:
        """(n,) int32: pages neither held nor recorded. O(capacity); for the ledger."""
        return self._book.free_page_ids()


class PagedTokenToKVPoolAllocator:
    """Hands out page ids 1..capacity; page 0 is padding and belongs to nobody."""

    def __init__(self, capacity: int, page_size: int, identity: CacheIdentity) -> None:
        self._book = _PageBook(capacity, page_size, identity)
        self.port = TokenAllocatorPort(self._book)

    @property
    def page_size(self) -> int:
        return self._book.page_size

    @property
    def capacity(self) -> int:
        return self._book.capacity

    @property
    def identity(self) -> CacheIdentity:
        return self._book.identity

    @property
    def num_free(self) -> int:
        """Pages that `allocate` could hand out now; recorded ones are not among them."""
        return self._book.num_free

    def allocate(self, num_pages: int) -> np.ndarray:
        """(num_pages,) int32, distinct, held by the caller from now on. OutOfPagesError and no change if short."""
        book = self._book
        if num_pages < 0:
            raise ValueError(f"num_pages={num_pages} is negative")
        if num_pages > book.num_free:
            raise OutOfPagesError(need=num_pages, free=book.num_free)
        if num_pages == 0:
            return _NO_PAGES
        top = book.capacity - book.num_free
        pages = book.stack[top : top + num_pages].copy()
        book.mark_held(pages)
        book.num_free -= num_pages
        return pages

    def apply_frees(self, pages: np.ndarray) -> None:
        """Recorded pages, (n,) int32, become free. Called inside `prepare_batch` only.

        Normally the latest `port.recorded_frees()`, then the check is one comparison; frees recorded since stay
        recorded. Raises ForeignPageError or DoubleFreeError and changes nothing for pages that are not recorded.
        """
        _require_int32(pages)
        if pages.size == 0:
            return
        book = self._book
        if book.is_first_recorded(pages):
            del book.recorded[0]
        else:
            self._unrecord(pages)
        book.num_recorded -= pages.size
        self._push(pages)

    def check_recorded(self, pages: np.ndarray) -> None:
        """Raise as `apply_frees` would, unless every page, (n,) int32, is recorded as freed. O(n) for the latest."""
        _require_int32(pages)
        if pages.size and not self._book.is_first_recorded(pages):
            self._refuse_unrecorded(pages)

    def check_held(self, pages: np.ndarray) -> None:
        """Raise StaleHandleError unless every page, (n,) int32, is held by somebody: the pages of a cached prefix."""
        _require_int32(pages)
        if pages.size == 0:
            return
        self._book.refuse_foreign(pages)
        loose = pages[self._book.state[pages] != _HELD]
        if loose.size:
            raise StaleHandleError(what="prefix page", held=loose[:8].tolist(), current="free")

    def give_back(self, pages: np.ndarray) -> None:
        """Held pages, (n,) int32, of a discarded reservation become free at once. Refuses as `port.free` does."""
        _require_int32(pages)
        if pages.size:
            self._book.take_held(pages)
            self._push(pages)

    def reset(self, identity: CacheIdentity) -> None:
        """The pool was lost, flushed or reopened: every page is free, under a new identity. O(capacity)."""
        self._book.clear(identity)

    def free_page_ids(self) -> np.ndarray:
        """(num_free,) int32, for the ledger. O(capacity)."""
        return self._book.free_page_ids()

    def recorded_page_ids(self) -> np.ndarray:
        """(n,) int32, for the ledger: freed by control and not applied yet."""
        return np.concatenate([_NO_PAGES, *self._book.recorded])

    def held_page_ids(self) -> np.ndarray:
        """(n,) int32 in increasing order, for the ledger: what requests and caches own together. O(capacity)."""
        return np.flatnonzero(self._book.state == _HELD).astype(np.int32)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free, recorded and held ids are disjoint and are 1..capacity. O(capacity)."""
        book = self._book
        free, recorded, held = self.free_page_ids(), self.recorded_page_ids(), self.held_page_ids()
        every = np.sort(np.concatenate([free, recorded, held]))
        broken = [
            text
            for text, good in (
                ("free, recorded and held pages are not 1..capacity, once each", np.array_equal(every, book.places)),
                ("the count of recorded pages is wrong", book.num_recorded == recorded.size),
                ("page 0, the padding page, is held", book.state[0] != _HELD),
            )
            if not good
        ]
        if broken:
            raise IntegrityError(owner=type(self).__name__, broken="; ".join(broken))

    def _push(self, pages: np.ndarray) -> None:
        book = self._book
        top = self.capacity - book.num_free
        book.stack[top - pages.size : top] = pages
        book.num_free += pages.size

    def _unrecord(self, pages: np.ndarray) -> None:
        """Take `pages` out of the recorded list, wherever they are in it; refuse others. O(recorded)."""
        self._refuse_unrecorded(pages)
        recorded = self.recorded_page_ids()
        left = recorded[~np.isin(recorded, pages)]
        self._book.recorded = [left] if left.size else []

    def _refuse_unrecorded(self, pages: np.ndarray) -> None:
        ids, counts = np.unique(pages, return_counts=True)
        self._book.refuse_foreign(pages)
        wrong = (counts > 1) | ~np.isin(ids, self.recorded_page_ids())
        if wrong.any():
            raise DoubleFreeError(pages=tuple(ids[wrong].tolist()))


def _index(pages: np.ndarray) -> np.ndarray:
    """(n,) intp. A negative id becomes a huge one, so that it is refused instead of counting from the end."""
    return pages.view(np.uint32).astype(np.intp)


def _require_int32(pages: np.ndarray) -> None:
    """A wider id would wrap round into somebody else's page."""
    if pages.dtype != np.int32:
        raise TypeError(f"page ids must be int32, not {pages.dtype}")
