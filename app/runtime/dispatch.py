"""One step on the device: from a prepared plan's rows to sampled tokens, dispatched without waiting.

Order on the device, which is the order of dispatch: page-table deltas; what running states begin with; all decode rows;
all prompt chunks; snapshots of states. Arrays that this file makes from host memory are fresh for each step, because
jax may read them after the call has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from app.core.batch import BatchPlan
from app.core.ports import DecodeInputs, ExtendInputs, ModelRunner, WindowPages
from app.core.sliding_window import first_seen_page, pages_seen
from app.memory.req_to_token_pool import ReqToTokenPool, TableDelta, gather_rows
from app.memory.window_pages import WindowPagePool, window_rows
from app.models.sampler import SampledTokens
from app.runtime.buckets import Buckets
from app.runtime.pools import LentPool
from app.runtime.row_sampling import RowSampling, feed
from app.runtime.running_states import RunningStates
from app.tpu.program import Program, from_host, replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of a prepared plan, (n,) int32 each.

    slots: decode rows, then extend rows, admissions resolved. admitted: the row of each admission.
    snapshot_slots: where each row's state goes after the step, 0 for nowhere; empty for a model without states.
    """

    slots: np.ndarray
    admitted: np.ndarray
    snapshot_slots: np.ndarray


@dataclass(frozen=True, slots=True)
class SectionResult:
    """The sampled tokens of one section of a step, on the device. Rows beyond `num_rows` are padding."""

    sampled: SampledTokens
    num_rows: int


class StepDispatcher:
    def __init__(
        self,
        *,
        rows: ReqToTokenPool,
        sampling: RowSampling,
        device_pool: LentPool,
        model_runner: ModelRunner,
        window: WindowPagePool | None = None,
        states: RunningStates | None = None,
    ) -> None:
        """window, states: None for a model without such layers."""
        self._window = window
        self._states = states
        self._rows = rows
        self._sampling = sampling
        self._pool = device_pool
        self._runner = model_runner

    def run(self, plan: BatchPlan, rows: StepRows, deltas: list[TableDelta], buckets: Buckets) -> list[SectionResult]:
        """Dispatch the plan. -> decode, then extend section.

        Whatever the device raises here leaves the pool's arrays lent: they are lost.
        """
        self.update_tables(deltas)
        if self._states is not None:
            self._states.begin(rows.admitted, plan.admissions)
        sections = []
        num_decodes = plan.decode_slots.size
        if num_decodes:
            sections.append(self._decode(plan, buckets))
        if rows.slots.size > num_decodes:
            sections.append(self._extend(plan, rows.slots[num_decodes:], buckets))
        if self._states is not None:
            self._states.keep(rows.slots, rows.snapshot_slots)
        return sections

    def update_tables(self, deltas: list[TableDelta]) -> None:
        """Bring the page tables on the device up to date."""
        self._rows.apply(deltas)
        if self._window is not None:
            self._window.apply(deltas)

    def _decode(self, plan: BatchPlan, buckets: Buckets) -> SectionResult:
        slots, lengths = plan.decode_slots, plan.decode_positions + 1
        size = buckets.rows(slots.size)
        padded_slots = _padded(slots, size)
        inputs = DecodeInputs(
            token_ids=feed(self._sampling.last_tokens(), padded_slots),
            lengths=_padded(lengths, size),
            page_table=self._page_table(padded_slots, buckets.pages(int(lengths.max()))),
            window=self._window_pages(padded_slots, plan.decode_positions, 1),
            state_slots=self._state_slots(slots, size),
        )
        logits = self._with_pool(self._runner.decode, inputs)
        everyone = np.ones(slots.size, np.bool_)
        return SectionResult(self._sampling.choose(logits, slots, lengths, everyone), slots.size)

    def _extend(self, plan: BatchPlan, slots: np.ndarray, buckets: Buckets) -> SectionResult:
        lengths, starts = plan.extend_lengths, plan.extend_starts
        size, num_tokens = buckets.rows(slots.size), buckets.tokens(plan.extend_token_ids.size)
        padded_slots = _padded(slots, size)
        inputs = ExtendInputs(
            token_ids=_padded(plan.extend_token_ids, num_tokens),
            chunk_starts=_padded(np.cumsum(lengths, dtype=np.int32) - lengths, size),
            chunk_lengths=_padded(lengths, size),
            prefix_lengths=_padded(starts, size),
            page_table=self._page_table(padded_slots, buckets.pages(int((starts + lengths).max()))),
            max_chunk=buckets.chunk(int(lengths.max())),
            window=self._window_pages(padded_slots, starts, num_tokens),
            state_slots=self._state_slots(slots, size),
        )
        logits = self._with_pool(self._runner.extend, inputs)
        return SectionResult(self._sampling.choose(logits, slots, starts + lengths, plan.extend_samples), slots.size)

    def _page_table(self, padded_slots: np.ndarray, width: int) -> Any:
        return _page_table(self._rows.device_table(), padded_slots, width=width)

    def _window_pages(self, padded_slots: np.ndarray, starts: np.ndarray, num_queries: int) -> WindowPages | None:
        """starts: (n,) int32, the position of each row's first query. num_queries: of one row at most, a bucket."""
        window = self._window
        if window is None:
            return None
        page_size = window.page_size
        first_pages = _padded(first_seen_page(starts, window.window, page_size), padded_slots.size)
        width = min(pages_seen(num_queries, window.window, page_size), window.max_pages)
        table = _window_table(window.device_table(), padded_slots, first_pages, width=width)
        return WindowPages(page_table=table, first_pages=first_pages)

    def _state_slots(self, slots: np.ndarray, size: int) -> np.ndarray | None:
        return None if self._states is None else self._states.running(slots, size)

    def _with_pool(self, program: Callable[[Any, Any], tuple[Any, Any]], inputs: Any) -> Any:
        buffers, logits = program(self._pool.take(), inputs)
        self._pool.put(buffers)
        return logits


_page_table = partial(jax.jit, static_argnames="width")(gather_rows)
_window_table = partial(jax.jit, static_argnames="width")(window_rows)


def _padded(values: np.ndarray, size: int) -> np.ndarray:
    """(size,) int32, a fresh array: `values`, then zeros."""
    padded = np.zeros(size, np.int32)
    padded[: values.size] = values
    return padded


def table_row_programs(*, num_rows: int, max_pages: int, batch: int, width: int, mesh: Mesh) -> list[Program]:
    """What cuts a section's page table, (batch, width), out of the table of all rows."""
    table = replicated(mesh, (num_rows, max_pages), np.int32)
    arguments = (table, from_host((batch,), np.int32))
    return [Program(name="page_table_rows", function=_page_table, arguments=arguments, statics={"width": width})]


def window_row_programs(*, num_rows: int, max_pages: int, batch: int, width: int, mesh: Mesh) -> list[Program]:
    """The same for window pages, from each row's first page on."""
    table = replicated(mesh, (num_rows, max_pages), np.int32)
    row = from_host((batch,), np.int32)
    arguments = (table, row, row)
    return [Program(name="window_table_rows", function=_window_table, arguments=arguments, statics={"width": width})]
