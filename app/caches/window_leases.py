"""Control's record of which window pages running requests hold, beside the leases of their full pages.

It follows the runtime without a message: both retire a row's own window pages by the same WindowRows, told the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from app.caches.base import NO_PAGES
from app.caches.page_list import PageList
from app.core.ports import TokenAllocator
from app.core.sliding_window import WindowRows, first_needed_page, pages_seen
from app.errors import IntegrityError

NOBODY = -1


@dataclass(slots=True)
class _Held:
    pages: PageList  # by page index; 0 for what is not needed
    shared: int  # leading page indexes that are the cache's
    row: int = NOBODY  # the runtime's, once it is known


class WindowLeases:
    """Window pages by request id. Single-threaded."""

    def __init__(self, *, allocator: TokenAllocator, window: int, num_rows: int) -> None:
        """num_rows: request rows of the runtime."""
        self._allocator = allocator
        self._window = window
        self._page_size = allocator.page_size
        self._rows = WindowRows(num_rows, window, allocator.page_size)
        self._held: dict[str, _Held] = {}
        self._by_row: dict[int, str] = {}

    @property
    def kept_pages(self) -> int:
        """The most pages that a row holds while it decodes."""
        return pages_seen(1, self._window, self._page_size) + 1

    def available(self) -> int:
        """Pages that the next prepare may hand out: free, recorded, and those that it retires first."""
        return self._allocator.available() + self._rows.due().num_pages

    def num_own(self, request_id: str) -> int:
        """Pages that the request holds and the cache does not."""
        held = self._held[request_id]
        return held.pages.size - self._first_own(held)

    def begin(self, request_id: str, pages: np.ndarray) -> None:
        """The request starts with the cache's pages, (n,) int32, 0 where it needs none."""
        self._held[request_id] = _Held(PageList(pages), pages.size)

    def seat(self, request_id: str, row: int) -> None:
        """The runtime gave the request a row."""
        held = self._held[request_id]
        held.row = row
        self._by_row[row] = request_id
        self._rows.begin(row, held.shared)

    def extend(self, request_id: str, pages: np.ndarray) -> None:
        """The request gained these pages, (n,) int32."""
        self._held[request_id].pages.append(pages)

    def settle(self, rows: int | np.ndarray, num_tokens: int | np.ndarray) -> None:
        """A step was read that computed the last of so many tokens of these rows."""
        self._rows.settle(rows, num_tokens)

    def retire(self) -> list[str]:
        """A plan was prepared: the runtime has retired what was due. -> requests past the cache's window pages."""
        past = []
        for row, first, end in zip(*(bounds.tolist() for bounds in self._rows.retire()), strict=True):
            held = self._held[self._by_row[row]]
            pages = held.pages.view()
            if first == held.shared:
                past.append(self._by_row[row])
                pages[:first] = 0
            pages[first:end] = 0
        return past

    def held_pages(self, request_id: str) -> np.ndarray:
        """(pages,) int32 by page index: what an insert is given."""
        return self._held[request_id].pages.view()

    def publish(self, request_id: str, cached: np.ndarray) -> bool:
        """So many more pages are the cache's now: `cached`, (n,) int32, 0 where it has none.

        Where the request held others, these are freed. -> whether there were such.
        """
        held = self._held[request_id]
        pages, first = held.pages.view(), held.shared
        end = first + cached.size
        own, theirs = pages[first:end], cached
        duplicates = NO_PAGES
        if own.tobytes() != theirs.tobytes():  # as bytes, which is quicker than `!=`
            duplicates = own[(own != 0) & (own != theirs)]
            self._allocator.free(duplicates)
        # What the cache may drop at any time is not this request's to read, nor to offer again.
        locked = first_needed_page(end * self._page_size, self._window, self._page_size)
        pages[first:end] = cached
        pages[:locked] = 0
        held.shared = end
        self._rows.share(held.row, held.shared)
        return bool(duplicates.size)

    def release(self, request_id: str) -> None:
        """Free the request's own pages."""
        held = self._held.pop(request_id)
        own = self._own(held)
        if own.size:
            self._allocator.free(own)
        if held.row != NOBODY:
            self._rows.end(held.row)
            del self._by_row[held.row]

    def reset(self) -> None:
        """The pool is gone, and every request with it."""
        self._held.clear()
        self._by_row.clear()
        self._rows.clear()

    def own_page_ids(self) -> np.ndarray:
        """(n,) int32, for the ledger."""
        return np.concatenate([np.empty(0, np.int32), *map(self._own, self._held.values())])

    def check_integrity(self) -> None:
        for request_id, held in self._held.items():
            if not 0 <= held.shared <= held.pages.size or (self._own(held) == 0).any():
                raise IntegrityError(owner="WindowLeases", broken=f"lease of {request_id!r}: {held}")

    def _own(self, held: _Held) -> np.ndarray:
        return held.pages.view()[self._first_own(held) :]

    def _first_own(self, held: _Held) -> int:
        return held.shared if held.row == NOBODY else self._rows.first_own(held.row)
