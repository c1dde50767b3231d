"""One step on the device: from a prepared plan's rows to sampled tokens, dispatched without waiting.

Order on the device, which is the order of dispatch: page-table delta; all decode rows; all prompt chunks. Arrays that
this file makes from host memory are fresh for each step, because jax may read them after the call has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from app.core.batch import BatchPlan
from app.core.ports import DecodeInputs, ExtendInputs, ModelRunner
from app.memory.req_to_token_pool import ReqToTokenPool, TableDelta, gather_rows
from app.models.sampler import SampledTokens
from app.runtime.row_sampling import RowSampling, feed
from app.tpu.program import Program, from_host, replicated

MIN_ROWS = 2  # a program with one row writes its KV a hundred times slower on CPU
MIN_CHUNK = 16
MIN_CONTEXT = 128  # tokens that the smallest page-table bucket covers


class LentPool(Protocol):
    """The device pool as the dispatcher uses it."""

    def take(self) -> Any: ...

    def put(self, buffers: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class SectionResult:
    """The sampled tokens of one section of a step, on the device. Rows beyond `num_rows` are padding."""

    sampled: SampledTokens
    num_rows: int


def bucket(count: int, smallest: int) -> int:
    """The power of two, at least `smallest`, that holds `count`: few shapes, so few compiled programs."""
    return max(smallest, 1 << max(count - 1, 0).bit_length())


class StepDispatcher:
    def __init__(
        self,
        *,
        rows: ReqToTokenPool,
        sampling: RowSampling,
        device_pool: LentPool,
        model_runner: ModelRunner,
        page_size: int,
    ) -> None:
        self._rows = rows
        self._sampling = sampling
        self._pool = device_pool
        self._runner = model_runner
        self._page_size = page_size

    def run(self, plan: BatchPlan, extend_slots: np.ndarray, deltas: list[TableDelta]) -> list[SectionResult]:
        """Dispatch the plan. `extend_slots`: rows of the extends, admissions resolved. -> decode, then extend section.

        Whatever the device raises here leaves the pool's arrays lent: they are lost.
        """
        self._rows.apply(deltas)
        sections = []
        if plan.decode_slots.size:
            sections.append(self._decode(plan))
        if extend_slots.size:
            sections.append(self._extend(plan, extend_slots))
        return sections

    def _decode(self, plan: BatchPlan) -> SectionResult:
        slots, lengths = plan.decode_slots, plan.decode_positions + 1
        size = bucket(slots.size, MIN_ROWS)
        padded_slots = _padded(slots, size)
        inputs = DecodeInputs(
            token_ids=feed(self._sampling.last_tokens(), padded_slots),
            lengths=_padded(lengths, size),
            page_table=self._page_table(padded_slots, int(lengths.max())),
        )
        logits = self._with_pool(self._runner.decode, inputs)
        everyone = np.ones(slots.size, np.bool_)
        return SectionResult(self._sampling.choose(logits, slots, lengths, everyone), slots.size)

    def _extend(self, plan: BatchPlan, slots: np.ndarray) -> SectionResult:
        lengths, starts = plan.extend_lengths, plan.extend_starts
        size = bucket(slots.size, MIN_ROWS)
        inputs = ExtendInputs(
            token_ids=_padded(plan.extend_token_ids, bucket(plan.extend_token_ids.size, MIN_CHUNK)),
            chunk_starts=_padded(np.cumsum(lengths, dtype=np.int32) - lengths, size),
            chunk_lengths=_padded(lengths, size),
            prefix_lengths=_padded(starts, size),
            page_table=self._page_table(_padded(slots, size), int((starts + lengths).max())),
            max_chunk=bucket(int(lengths.max()), MIN_CHUNK),
        )
        logits = self._with_pool(self._runner.extend, inputs)
        return SectionResult(self._sampling.choose(logits, slots, starts + lengths, plan.extend_samples), slots.size)

    def _page_table(self, padded_slots: np.ndarray, longest: int) -> Any:
        smallest = -(-MIN_CONTEXT // self._page_size)
        width = min(bucket(-(-longest // self._page_size), smallest), self._rows.max_pages)
        return _page_table(self._rows.device_table(), padded_slots, width=width)

    def _with_pool(self, program: Callable[[Any, Any], tuple[Any, Any]], inputs: Any) -> Any:
        buffers, logits = program(self._pool.take(), inputs)
        self._pool.put(buffers)
        return logits


_page_table = partial(jax.jit, static_argnames="width")(gather_rows)


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
