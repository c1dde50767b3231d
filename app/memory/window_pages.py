"""The pages of sliding-window layers: a pool of its own, and which of them each request row reads.

A row's window pages stand at the same page indexes as its full pages, so both are reserved together and in equal
number. What differs is how they leave: the runtime retires a row's own window pages once its window has passed them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.core.batch import BatchPlan, PageRewrite
from app.core.handles import CacheIdentity
from app.core.sliding_window import WindowRows
from app.errors import IntegrityError, OutOfPagesError, OwnershipError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.req_to_token_pool import TableDelta, merged_cells, scatter_cells


class WindowPagePool:
    """Allocator, page table and frontiers of the window layers. Owned by the runtime; single-threaded."""

    def __init__(
        self, *, allocator: PagedTokenToKVPoolAllocator, window: int, num_rows: int, max_pages: int, mesh: Mesh
    ) -> None:
        """window: tokens that a query sees, its own included. max_pages: of the longest request."""
        self.window = window
        self.max_pages = max_pages
        self._allocator = allocator
        self._rows = WindowRows(num_rows, window, allocator.page_size)
        self._mirror = np.zeros((num_rows, max_pages), np.int32)  # 0 where the row has no page
        self._mesh = mesh
        self._device: Any = None

    @property
    def page_size(self) -> int:
        return self._allocator.page_size

    @property
    def allocator(self) -> PagedTokenToKVPoolAllocator:
        """Of its pages, for whoever reserves some that are no row's."""
        return self._allocator

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    def open(self) -> None:
        """Allocate the device table, all padding."""
        sharding = NamedSharding(self._mesh, PartitionSpec())
        self._device = jnp.zeros(self._mirror.shape, jnp.int32, device=sharding)

    def close(self) -> None:
        self._device = None

    def reset(self, identity: CacheIdentity) -> None:
        """Every page is free and every row empty, under a new identity."""
        self._allocator.reset(identity)
        self._rows.clear()
        self._mirror[:] = 0
        self.open()

    def check_plan(self, plan: BatchPlan) -> None:
        """Raise unless every window page that the plan names is the plan's to name. Row handles were checked before."""
        self._allocator.check_recorded(plan.free_window_pages)
        for admission in plan.admissions:
            self._check_named(admission.prefix_window_pages, admission.prefix_pages.size)
        for rewrite in plan.rewrites:
            self._check_named(rewrite.window_pages, rewrite.pages.size)

    def check_capacity(self, plan: BatchPlan, num_pages: int) -> None:
        """OutOfPagesError unless so many pages are there once the plan's frees and retirements are applied."""
        free = self._allocator.num_free + plan.free_window_pages.size
        if num_pages > free:
            free += self._due_after(plan)
        if num_pages > free:
            raise OutOfPagesError(need=num_pages, free=free)

    def begin(self, plan: BatchPlan) -> None:
        """Apply what the plan says about rows that are there: frees, ends, what is the cache's now; then retire."""
        self._allocator.apply_frees(plan.free_window_pages)
        self._apply(self._rows, plan)
        self._mirror[plan.release_slots] = 0
        retired = self._rows.retire()
        for row, first, end in zip(*(bounds.tolist() for bounds in retired), strict=True):
            self._allocator.give_back(self._mirror[row, first:end].copy())
            self._mirror[row, first:end] = 0

    def admit(self, slot: int, prefix_pages: np.ndarray, delta: TableDelta) -> TableDelta:
        """The row starts with the cache's pages, (n,) int32, 0 where it needs none. `delta`: of its full pages."""
        self._rows.begin(slot, prefix_pages.size)
        self._mirror[slot] = 0
        return self._write(delta, prefix_pages)

    def rewrite(self, rewrite: PageRewrite, delta: TableDelta) -> TableDelta:
        """Point a row at the cache's pages. `delta`: of its full pages."""
        return self._write(delta, rewrite.window_pages)

    def append(self, delta: TableDelta) -> TableDelta:
        """Allocate a page for each full page that rows gained."""
        return self._write(delta, self._allocator.allocate(delta.pages.size))

    def undo(self, pages: np.ndarray, admitted: np.ndarray) -> None:
        """Give back what a discarded batch reserved: pages, and the rows that it would have begun."""
        self._allocator.give_back(pages)
        self._rows.end(admitted)

    def settle(self, slots: np.ndarray, num_tokens: np.ndarray) -> None:
        """A step was read that computed the last of so many tokens of these rows."""
        self._rows.settle(slots, num_tokens)

    def apply(self, deltas: list[TableDelta]) -> None:
        """Bring the device table up to date, in one dispatch."""
        cells = merged_cells([(delta.rows, delta.columns, delta.window_pages) for delta in deltas])
        if cells.shape[1]:
            self._device = scatter_cells(self._device, cells)

    def device_table(self) -> Any:
        """(num_rows, max_pages) int32 device array. Valid until the next `apply`."""
        return self._device

    def check_integrity(self, page_counts: np.ndarray) -> None:
        """Every page that a row needs is held, and its own are nobody else's. page_counts: of rows in use, else 0."""
        self._allocator.check_integrity()
        held = np.append(self._allocator.held_page_ids(), 0)
        own = []
        for row in np.flatnonzero(page_counts).tolist():
            pages = self._mirror[row, : page_counts[row]]
            needed = pages[self._rows.first_needed(row) :]
            stray = np.setdiff1d(np.setdiff1d(needed, held), self._allocator.recorded_page_ids())
            if stray.size:
                raise IntegrityError(owner="WindowPagePool", broken=f"row {row} reads free pages {stray[:8].tolist()}")
            own.append(pages[self._rows.first_own(row) :])
        every = np.concatenate(own) if own else np.empty(0, np.int32)
        if np.unique(every).size != every.size or (every == 0).any():
            raise IntegrityError(owner="WindowPagePool", broken="a page is two rows' own, or a row lacks one")

    def _check_named(self, pages: np.ndarray, count: int) -> None:
        if pages.size != count:
            raise OwnershipError(what="window pages", reason=f"{pages.size} named for {count} full pages")
        self._allocator.check_held(pages[pages != 0])

    def _apply(self, rows: WindowRows, plan: BatchPlan) -> None:
        rows.end(plan.release_slots)
        rows.share(plan.published_slots, plan.published_counts)

    def _due_after(self, plan: BatchPlan) -> int:
        """Pages that `begin` would retire."""
        rows = self._rows.copy()
        self._apply(rows, plan)
        return rows.due().num_pages

    def _write(self, delta: TableDelta, pages: np.ndarray) -> TableDelta:
        self._mirror[delta.rows, delta.columns] = pages
        return delta._replace(window_pages=pages)


def window_rows(table: jax.Array, slots: jax.Array, first_pages: jax.Array, width: int) -> jax.Array:
    """(n, width) int32: `width` pages of each row from first_pages on; for use inside a jit.

    Columns beyond the table repeat its last; slots that are none read row 0.
    """
    rows = jnp.where(slots < table.shape[0], slots, 0)
    columns = jnp.minimum(first_pages[:, None] + jnp.arange(width), table.shape[1] - 1)
    return table[rows[:, None], columns]
