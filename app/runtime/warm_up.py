"""Compiling the programs that most runs need before the first request waits for them.

Each program runs once on padding alone: nothing is written to the pool, nothing is read by anybody. Other shapes (long
contexts, requests with penalties, sampling) are compiled when a step first needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import numpy as np

from app.core.ports import DecodeInputs, ExtendInputs, ModelRunner
from app.models.sampler import SamplingVariant, greedy_rows, sample
from app.runtime.dispatch import MIN_CHUNK, MIN_CONTEXT, MIN_ROWS, LentPool, bucket


class WarmShape(NamedTuple):
    """One set of programs: decoding `rows` requests, or one chunk of `chunk` tokens (0: a decode)."""

    rows: int
    chunk: int

    def describe(self) -> str:
        return f"prompt chunks of {self.chunk} tokens" if self.chunk else f"decoding {self.rows} requests"


def warm_shapes(max_rows: int, chunk_tokens: int) -> list[WarmShape]:
    """Every batch bucket of decoding, and every chunk bucket of one prompt, for short contexts."""
    decodes = [WarmShape(rows, 0) for rows in _buckets(MIN_ROWS, max_rows)]
    chunks = [WarmShape(MIN_ROWS, chunk) for chunk in _buckets(MIN_CHUNK, chunk_tokens)]
    return decodes + chunks


def warm_up(
    runner: ModelRunner,
    pool: LentPool,
    shapes: list[WarmShape],
    *,
    page_size: int,
    report: Callable[[str, float], None],
) -> None:
    """Compile and run `shapes`. `report` is told what is being compiled and the fraction done. Seconds each, once."""
    for done, shape in enumerate(shapes):
        report(f"compiling {shape.describe()}", done / len(shapes))
        logits = _run(runner, pool, shape, page_size)
        sample(logits, greedy_rows(shape.rows), None, variant=SamplingVariant()).token_ids.block_until_ready()
    report("compiled", 1.0)


def _run(runner: ModelRunner, pool: LentPool, shape: WarmShape, page_size: int) -> jax.Array:
    nothing = np.zeros(shape.rows, np.int32)
    context = max(MIN_CONTEXT, bucket(shape.chunk, MIN_CHUNK))
    table = np.zeros((shape.rows, -(-context // page_size)), np.int32)
    if shape.chunk:
        buffers, logits = runner.extend(
            pool.take(),
            ExtendInputs(
                token_ids=np.zeros(shape.chunk, np.int32),
                chunk_starts=nothing,
                chunk_lengths=nothing,
                prefix_lengths=nothing,
                page_table=table,
                max_chunk=shape.chunk,
            ),
        )
    else:
        buffers, logits = runner.decode(pool.take(), DecodeInputs(token_ids=nothing, lengths=nothing, page_table=table))
    pool.put(buffers)
    return logits


def _buckets(smallest: int, largest: int) -> Iterator[int]:
    size = smallest
    while size < bucket(largest, smallest):
        yield size
        size *= 2
    yield size
