"""The host tier's pages: which are held, and what is in them.

A page's life, beside its allocator's (paged_allocator.py); `port.free` only records:

             allocate                put                  apply_frees, give_back
    FREE  ------------->  EMPTY  ---------->  FILLED  ------------------------------>  FREE
                           |  ^                   |
                           |  `------ drop -------'
                           `-------------------------- give_back ------------------> FREE

The content of a page is a few arrays in pinned host memory that nobody writes to (app/tpu/page_carrier.py), so whoever
got them may go on reading them after the page is somebody else's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from app.core.handles import CacheIdentity
from app.core.transfers import OfEachPool, PageCounts, PageIds
from app.errors import ForeignPageError, IntegrityError, OutOfPagesError, OwnershipError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.tpu.page_carrier import PageArrays, PageCarrier, PoolContents

_NO_PAGES = np.empty(0, np.int32)


class HostKVPool:
    """Owner of host pages of every kind. Single-threaded, like its allocators, whose ports are control's.

    Memory: what the filled pages take. Every call costs O(pages named).
    """

    def __init__(
        self,
        *,
        allocators: OfEachPool[PagedTokenToKVPoolAllocator | None],
        carriers: OfEachPool[PageCarrier | None],
    ) -> None:
        """Both have the same kinds: those of the model."""
        self.allocators = allocators
        self._kinds = OfEachPool(
            *(
                None if allocator is None or carrier is None else _HostPages(allocator, carrier)
                for allocator, carrier in zip(allocators, carriers, strict=True)
            )
        )

    @property
    def num_bytes(self) -> int:
        """Of filled pages; what every rank holds counts once."""
        return sum(kind.num_bytes for kind in self._there())

    def num_free(self) -> PageCounts:
        return PageCounts(*(0 if kind is None else kind.allocator.num_free for kind in self._kinds))

    def allocate(self, counts: PageCounts) -> PageIds:
        """Empty pages, held by the caller from now on. OutOfPagesError, and no change, when one kind is short."""
        for count, free in zip(counts, self.num_free(), strict=True):
            if count > free:
                raise OutOfPagesError(need=count, free=free)
        return PageIds(
            *(
                _NO_PAGES if kind is None else kind.allocator.allocate(count)
                for kind, count in zip(self._kinds, counts, strict=True)
            )
        )

    def give_back(self, ids: PageIds) -> None:
        """Held pages become free at once: of a reservation or a transfer that came to nothing.

        OwnershipError, and no change, for others.
        """
        for kind, pages in self._each(ids):
            kind.allocator.check_held(pages)
        for kind, pages in self._each(ids):
            kind.allocator.give_back(pages)
            kind.forget(pages)

    def check_recorded(self, ids: PageIds) -> None:
        """Raise as `apply_frees` would, before anything is changed."""
        for kind, pages in self._each(ids):
            kind.allocator.check_recorded(pages)

    def apply_frees(self, ids: PageIds) -> None:
        """Pages that control freed become free, and lose their content."""
        for kind, pages in self._each(ids):
            kind.allocator.apply_frees(pages)
            kind.forget(pages)

    def put(self, ids: PageIds, contents: PoolContents) -> None:
        """Fill held, empty pages with host arrays. OwnershipError, and no change, for others."""
        arrived = [pages for kind, pages in zip(self._kinds, contents, strict=True) if kind is not None]
        filled = [(kind, pages, content) for (kind, pages), content in zip(self._each(ids), arrived, strict=True)]
        for kind, pages, content in filled:
            kind.check_empty(pages, len(content))
        for kind, pages, content in filled:
            kind.put(pages, content)

    def get(self, ids: PageIds) -> PoolContents:
        """The content of filled pages. OwnershipError for others: nobody may read what has not arrived."""
        contents = {id(kind): kind.get(pages) for kind, pages in self._each(ids)}
        return OfEachPool(*(contents.get(id(kind), []) for kind in self._kinds))

    def drop(self, ids: PageIds) -> None:
        """Filled pages become empty; they stay held. OwnershipError, and no change, for others."""
        self.get(ids)
        for kind, pages in self._each(ids):
            kind.forget(pages)

    def filled(self) -> PageIds:
        """In increasing order, for the ledger."""
        return PageIds(*(_NO_PAGES if kind is None else kind.filled() for kind in self._kinds))

    def reset(self, identity: CacheIdentity) -> None:
        """Every page is free and nothing is kept, under a new identity."""
        for kind in self._there():
            kind.allocator.reset(identity)
        self.close()

    def close(self) -> None:
        """Let go of all content. Idempotent."""
        for kind in self._there():
            kind.clear()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless what is filled is in somebody's hands, and is a page. O(capacity)."""
        for kind in self._there():
            kind.check_integrity()

    def _there(self) -> list[_HostPages]:
        return [kind for kind in self._kinds if kind is not None]

    def _each(self, ids: PageIds) -> list[tuple[_HostPages, np.ndarray]]:
        for kind, pages in zip(self._kinds, ids, strict=True):
            if kind is None and pages.size:
                raise ForeignPageError(pages=tuple(pages.tolist()), capacity=0)
        return [(kind, pages) for kind, pages in zip(self._kinds, ids, strict=True) if kind is not None]


class _HostPages:
    """Those of one kind. contents: of filled pages, by id."""

    def __init__(self, allocator: PagedTokenToKVPoolAllocator, carrier: PageCarrier) -> None:
        self.allocator = allocator
        self._page = carrier.page
        self._page_bytes = carrier.page_bytes
        self._contents: dict[int, PageArrays] = {}

    @property
    def num_bytes(self) -> int:
        return len(self._contents) * self._page_bytes

    def check_empty(self, pages: np.ndarray, num_contents: int) -> None:
        self.allocator.check_held(pages)
        ids = set(pages.tolist())
        if not len(ids) == pages.size == num_contents:
            raise OwnershipError(what="host pages", reason=f"{num_contents} contents for {len(ids)} pages")
        if taken := ids & self._contents.keys():
            raise OwnershipError(what=f"host pages {_few(taken)}", reason="filled already: drop them first")

    def put(self, pages: np.ndarray, contents: Sequence[PageArrays]) -> None:
        self._contents.update(zip(pages.tolist(), contents, strict=True))

    def get(self, pages: np.ndarray) -> list[PageArrays]:
        ids = pages.tolist()
        if missing := set(ids) - self._contents.keys():
            raise OwnershipError(what=f"host pages {_few(missing)}", reason="not filled: their content is not there")
        return [self._contents[page] for page in ids]

    def forget(self, pages: np.ndarray) -> None:
        for page in pages.tolist():
            self._contents.pop(page, None)

    def filled(self) -> np.ndarray:
        return np.array(sorted(self._contents), np.int32)

    def clear(self) -> None:
        self._contents.clear()

    def check_integrity(self) -> None:
        self.allocator.check_integrity()
        loose = np.intersect1d(self.filled(), self.allocator.free_page_ids())
        if loose.size:
            raise IntegrityError(owner="HostKVPool", broken=f"free pages {_few(loose.tolist())} have content")
        wrong = [page for page, content in self._contents.items() if not self._is_page(content)]
        if wrong:
            raise IntegrityError(owner="HostKVPool", broken=f"pages {_few(wrong)} hold what is no page")

    def _is_page(self, content: PageArrays) -> bool:
        return len(content) == len(self._page) and all(
            (array.shape, array.dtype, array.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)
            and not array.is_deleted()
            for array, wanted in zip(content, self._page, strict=True)
        )


def _few(pages: Iterable[int]) -> list[int]:
    return sorted(pages)[:8]
