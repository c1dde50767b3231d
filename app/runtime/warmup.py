"""Compiling a step's programs before there are requests: the very steps of serving, with rows that are all padding.

Padding rows have length 0, so nothing is written to the pool. Row 0 lends its sampling parameters, because what they
ask for decides which sampler is compiled; the next request in that row brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import numpy as np

from app.config.server_args import WarmupLevel
from app.core.batch import Admission, BatchPlan
from app.core.handles import CacheIdentity
from app.core.sampling import SamplingParams
from app.memory.req_to_token_pool import ReqToTokenPool
from app.runtime.buckets import DecodeShape, ExtendShape, ReachableShapes
from app.runtime.dispatch import StepDispatcher, StepRows
from app.runtime.row_sampling import RowSampling

_NOTHING = np.empty(0, np.int32)
_ROW = np.zeros(1, np.int32)

# One for each choice of app.models.sampler, the cheapest first.
_GREEDY = SamplingParams(seed=0)
_CHOICES = (_GREEDY, replace(_GREEDY, temperature=1.0), replace(_GREEDY, temperature=1.0, top_p=0.5))


class WarmupStep(NamedTuple):
    """what: for whoever waits. run: compiles it, or reads it back, and runs it once."""

    what: str
    run: Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exactly:
    """Buckets that a padding row fills, whatever its sizes."""

    shape: ExtendShape

    def rows(self, count: int) -> int:
        return self.shape.rows

    def tokens(self, count: int) -> int:
        return self.shape.tokens

    def chunk(self, longest: int) -> int:
        return self.shape.chunk

    def pages(self, num_tokens: int) -> int:
        return self.shape.pages


class WarmUp:
    """Over the parts of a runtime in which no request has a row. Its steps leave nothing behind but programs."""

    def __init__(
        self, *, dispatcher: StepDispatcher, rows: ReqToTokenPool, sampling: RowSampling, identity: CacheIdentity
    ) -> None:
        self._dispatcher = dispatcher
        self._rows = rows
        self._sampling = sampling
        self._identity = identity

    def steps(self, level: WarmupLevel, shapes: ReachableShapes) -> list[WarmupStep]:
        """Those of "all" are every program that a step can call."""
        match level:
            case "none" | "copies":
                return []
            case "decode":
                return self._decode_steps(shapes)
            case "all":
                return self._decode_steps(shapes) + self._other_steps(shapes)

    def _decode_steps(self, shapes: ReachableShapes) -> list[WarmupStep]:
        """Page-table updates of every size; decoding of every shape; every choice of a token."""
        narrowest, *wider = shapes.pages()
        steps = [WarmupStep("page table", self._update_table)]
        for rows in shapes.rows():
            steps += [self._decode(DecodeShape(rows, narrowest), params) for params in _CHOICES]
            steps += [self._decode(DecodeShape(rows, pages), _GREEDY) for pages in wider]
        return steps

    def _other_steps(self, shapes: ReachableShapes) -> list[WarmupStep]:
        """Prompts of every shape; log-probabilities and penalties."""
        narrowest = shapes.pages()[0]
        steps = [
            self._decode(DecodeShape(rows, narrowest), replace(params, logprobs=logprobs, presence_penalty=penalty))
            for rows in shapes.rows()
            for params in _CHOICES
            for logprobs in (None, 0, 1)
            for penalty in (0.0, 0.5)
        ]
        return steps + [self._extend(shape) for shape in shapes.extends()]

    def _update_table(self) -> None:
        for delta in self._rows.deltas_of_every_size():
            self._dispatcher.update_tables([delta._replace(window_pages=delta.pages)])
        jax.block_until_ready(self._rows.device_table())

    def _decode(self, shape: DecodeShape, params: SamplingParams) -> WarmupStep:
        plan = BatchPlan(
            identity=self._identity,
            decode_slots=_ROW,
            decode_generations=_ROW,
            decode_positions=np.full(1, -1, np.int32),
        )
        filled = ExtendShape(rows=shape.rows, tokens=0, chunk=0, pages=shape.pages)
        what = f"decode, {shape.rows} rows, {shape.pages} pages"
        return WarmupStep(what, lambda: self._run(plan, filled, params))

    def _extend(self, shape: ExtendShape) -> WarmupStep:
        plan = BatchPlan(
            identity=self._identity,
            extend_slots=_ROW,
            extend_generations=_ROW,
            extend_starts=_ROW,
            extend_lengths=_ROW,
            extend_samples=np.zeros(1, np.bool_),
        )
        what = f"prompts, {shape.tokens} tokens, {shape.rows} rows of {shape.chunk}, {shape.pages} pages"
        return WarmupStep(what, lambda: self._run(plan, shape, _GREEDY))

    def _run(self, plan: BatchPlan, shape: ExtendShape, params: SamplingParams) -> None:
        self._sampling.admit(0, Admission(prefix_pages=_NOTHING, prompt_length=0, token_ids=_NOTHING, sampling=params))
        rows = StepRows(slots=_ROW, admitted=_NOTHING, snapshot_slots=_NOTHING)
        sections = self._dispatcher.run(plan, rows, [], _Exactly(shape=shape))
        jax.block_until_ready([section.sampled for section in sections])
