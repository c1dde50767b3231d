"""The request rows: which pages each running request reads, in token order.

Two copies of one table. The host mirror is the truth and is changed at once, vectorised; the device table follows by
one packed delta per executed step, in dispatch order, so that a step already dispatched never sees a later change.

    mirror  (num_rows, max_pages) int32   changed by prepare_batch
    device  (num_rows, max_pages) int32   donated and replaced by `apply` right before the step that needs it
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.core.batch import PageRewrite
from app.errors import IntegrityError, OutOfRequestSlotsError, StaleHandleError
from app.tpu.program import Program, from_host, replicated

_SMALLEST_DELTA = 16
NO_PAGES = np.empty(0, np.int32)


class TableDelta(NamedTuple):
    """Cells that changed: table[rows[i], columns[i]] = pages[i]; each cell at most once. (n,) int32 each.

    window_pages: for a model with sliding windows, what the same cells of the window's table are now; else empty.
    """

    rows: np.ndarray
    columns: np.ndarray
    pages: np.ndarray
    window_pages: np.ndarray = NO_PAGES


class ReqToTokenPool:
    """Rows with generations, and the page table over them. Owned by the runtime; single-threaded."""

    def __init__(self, *, num_rows: int, max_pages: int, mesh: Mesh) -> None:
        """`max_pages`: pages of the longest request, the width of a row."""
        self.num_rows = num_rows
        self.max_pages = max_pages
        self._mesh = mesh
        self._mirror = np.zeros((num_rows, max_pages), np.int32)
        self._device: Any = None
        self.page_counts = np.zeros(num_rows, np.int32)
        self.generations = np.zeros(num_rows, np.int32)
        self._in_use = np.zeros(num_rows, np.bool_)
        self._free_slots = list(range(num_rows - 1, -1, -1))

    def open(self) -> None:
        """Allocate the device table, all padding."""
        sharding = NamedSharding(self._mesh, PartitionSpec())
        # Not device_put of a host array: with several nodes that would compare it over all of them.
        self._device = jnp.zeros((self.num_rows, self.max_pages), jnp.int32, device=sharding)

    def close(self) -> None:
        self._device = None

    def reset(self) -> None:
        """Every row is free and every handle stale; the device table is made anew."""
        self.generations += 1
        self.page_counts[:] = 0
        self._in_use[:] = False
        self._free_slots = list(range(self.num_rows - 1, -1, -1))
        self.open()

    @property
    def num_free(self) -> int:
        return len(self._free_slots)

    def check_handles(self, slots: np.ndarray, generations: np.ndarray) -> None:
        """Raise StaleHandleError unless each (slot, generation) is a row in use now. (n,) int32 each. O(n)."""
        if slots.size == 0:
            return
        if slots.min() < 0 or slots.max() >= self.num_rows:
            raise StaleHandleError(what="request row", held=slots.tolist(), current=f"rows 0..{self.num_rows - 1}")
        good = self.is_current(slots, generations)
        if not good.all():
            bad = int(np.flatnonzero(~good)[0])
            slot = int(slots[bad])
            raise StaleHandleError(
                what="request row", held=(slot, int(generations[bad])), current=(slot, int(self.generations[slot]))
            )

    def is_current(self, slots: np.ndarray, generations: np.ndarray) -> np.ndarray:
        """(n,) bool: whether each row is in use under that generation. (n,) int32 each."""
        return (self.generations[slots] == generations) & self._in_use[slots]

    def allocate(self, count: int) -> np.ndarray:
        """-> (count,) int32 slots, empty rows under a new generation. OutOfRequestSlotsError changes nothing."""
        if count > len(self._free_slots):
            raise OutOfRequestSlotsError(need=count, free=len(self._free_slots))
        slots = np.array([self._free_slots.pop() for _ in range(count)], np.int32)
        if count == 0:
            return slots
        self.generations[slots] += 1
        self._in_use[slots] = True
        self.page_counts[slots] = 0
        return slots

    def release(self, slots: np.ndarray) -> None:
        """Rows that end; checked before by `check_handles`. Their pages are nobody's business here."""
        if slots.size == 0:
            return
        self._in_use[slots] = False
        self._free_slots.extend(slots.tolist())

    def append(self, slots: np.ndarray, counts: np.ndarray, pages: np.ndarray) -> TableDelta:
        """Give row slots[i] its next counts[i] pages, taken from `pages` in order. Slots are distinct. O(pages)."""
        growing = np.flatnonzero(counts)
        slots, counts = slots[growing], counts[growing]
        rows = np.repeat(slots, counts)
        firsts = np.cumsum(counts) - counts
        columns = np.arange(pages.size, dtype=np.int32) + np.repeat(self.page_counts[slots] - firsts, counts)
        self._mirror[rows, columns] = pages
        self.page_counts[slots] += counts
        return TableDelta(rows, columns.astype(np.int32, copy=False), pages)

    def rewrite(self, rewrite: PageRewrite) -> TableDelta:
        """Point a row at other pages holding the same tokens."""
        columns = np.arange(rewrite.first_page_index, rewrite.first_page_index + rewrite.pages.size, dtype=np.int32)
        self._mirror[rewrite.slot, columns] = rewrite.pages
        return TableDelta(np.full(columns.size, rewrite.slot, np.int32), columns, rewrite.pages)

    def undo_append(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Take back the last `counts` pages of each row: a reservation that is not going to be executed."""
        self.page_counts[slots] -= counts

    def device_table(self) -> Any:
        """(num_rows, max_pages) int32 device array. Valid until the next `apply`."""
        return self._device

    def apply(self, deltas: list[TableDelta]) -> None:
        """Bring the device table up to date with `deltas`, in order, in one dispatch. O(cells) bytes travel."""
        cells = merged_cells([(delta.rows, delta.columns, delta.pages) for delta in deltas])
        if cells.shape[1]:
            self._device = scatter_cells(self._device, cells)

    def deltas_of_every_size(self) -> Iterator[TableDelta]:
        """One for each program that `apply` may dispatch. Their cells lie beyond the table: they change nothing."""
        size = _SMALLEST_DELTA
        while size < 2 * max(self.num_rows * self.max_pages, _SMALLEST_DELTA):
            yield TableDelta(np.full(size, self.num_rows, np.int32), np.zeros(size, np.int32), np.zeros(size, np.int32))
            size *= 2

    def row_pages(self, slot: int) -> np.ndarray:
        """(n,) int32, the pages that the row reads."""
        return self._mirror[slot, : self.page_counts[slot]].copy()

    def slots_in_use(self) -> np.ndarray:
        return np.flatnonzero(self._in_use).astype(np.int32)

    def page_counts_in_use(self) -> np.ndarray:
        """(rows,) int32: pages of each row, 0 for one that is free."""
        return np.where(self._in_use, self.page_counts, 0).astype(np.int32)

    def check_integrity(self) -> None:
        free = set(self._free_slots)
        if len(free) != len(self._free_slots):
            raise IntegrityError(owner="ReqToTokenPool", broken="a row is twice on the free list")
        if free & set(self.slots_in_use().tolist()) or len(free) + int(self._in_use.sum()) != self.num_rows:
            raise IntegrityError(owner="ReqToTokenPool", broken="rows in use and free rows are not all rows once")
        for slot in self.slots_in_use():
            pages = self.row_pages(slot)
            if pages.size and (pages.min() < 1 or np.unique(pages).size != pages.size):
                raise IntegrityError(owner="ReqToTokenPool", broken=f"row {slot} reads a page twice or the padding")

    def check_reads(self, readable: np.ndarray) -> None:
        """Raise IntegrityError if a row reads a page that is not among these, (n,) int32."""
        for slot in self.slots_in_use().tolist():
            stray = np.setdiff1d(self.row_pages(slot), readable)
            if stray.size:
                raise IntegrityError(owner="ReqToTokenPool", broken=f"row {slot} reads free pages {stray[:8].tolist()}")


def merged_cells(writes: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
    """Rows, columns and pages, (n,) int32 each, in order of writing -> one (3, bucket) int32 blob.

    A later write to a cell replaces an earlier one; padding is out of range.
    """
    writes = [write for write in writes if write[0].size]
    if not writes:
        return np.empty((3, 0), np.int32)
    cells = np.concatenate([np.stack(write) for write in writes], axis=1)
    if len(writes) > 1:
        # A scatter with two writes to one cell has no defined winner: keep the last of each.
        cell_ids = cells[0].astype(np.int64) << 32 | cells[1]
        _, last = np.unique(cell_ids[::-1], return_index=True)
        cells = cells[:, cell_ids.size - 1 - last]
    bucket = max(_SMALLEST_DELTA, 1 << (cells.shape[1] - 1).bit_length())
    padded = np.full((3, bucket), np.iinfo(np.int32).max, np.int32)
    padded[:, : cells.shape[1]] = cells
    return padded


@partial(jax.jit, donate_argnums=0)
def scatter_cells(table: jax.Array, cells: jax.Array) -> jax.Array:
    return table.at[cells[0], cells[1]].set(cells[2], mode="drop")


def gather_rows(table: jax.Array, slots: jax.Array, width: int) -> jax.Array:
    """(n, width) int32: the first `width` pages of each row; for use inside a jit. Out-of-range slots read row 0."""
    rows = jnp.where(slots < table.shape[0], slots, 0)
    return jax.lax.dynamic_slice_in_dim(table, 0, width, axis=1)[rows]


def table_programs(*, num_rows: int, max_pages: int, num_cells: int, mesh: Mesh) -> list[Program]:
    """What `apply` dispatches for a step that changes `num_cells` cells."""
    table = replicated(mesh, (num_rows, max_pages), np.int32)
    cells = from_host((3, max(_SMALLEST_DELTA, 1 << (num_cells - 1).bit_length())), np.int32)
    return [Program(name="page_table_update", function=scatter_cells, arguments=(table, cells), donated=(table,))]
