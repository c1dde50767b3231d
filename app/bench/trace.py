"""Requests of a Mooncake trace (JSON lines), and tokens for them.

A line has input_length, output_length and hash_ids: ids of the prompt's blocks of 512 tokens, the last one partial; an
id stands for the block and everything before it. The trace has no tokens; any fixed map of (id, offset) will do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from app.errors import ConfigError

BLOCK_TOKENS = 512
VOCAB_SIZE = 128_000
_FIRST_OUTPUT_ID = 1 << 40  # outputs are nobody's blocks: ids of their own, far from those of the trace


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """`index`: its place in the trace."""

    index: int
    input_length: int  # tokens
    output_length: int  # tokens
    block_ids: tuple[int, ...]

    def token_ids(self) -> np.ndarray:
        """(input_length + output_length,) int32: the prompt, then an output that no other request has."""
        prompt = _block_tokens(np.array(self.block_ids, np.uint64))[: self.input_length]
        num_blocks = -(-self.output_length // BLOCK_TOKENS)
        first = _FIRST_OUTPUT_ID + (self.index << 20)
        output = _block_tokens(np.arange(first, first + num_blocks, dtype=np.uint64))[: self.output_length]
        return np.concatenate([prompt, output])


def read_mooncake_trace(path: Path, num_requests: int | None) -> list[TraceRequest]:
    """The first `num_requests` requests; all for None, or if there are fewer. ConfigError for a file that is none."""
    try:
        with path.open(encoding="utf-8") as lines:
            requests = [_request(index, json.loads(line)) for index, line in enumerate(islice(lines, num_requests))]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            field="--trace", value=str(path), allowed=f"a Mooncake trace, one JSON object a line ({error!r})"
        ) from error
    if not requests:
        raise ConfigError(field="--trace", value=str(path), allowed="a Mooncake trace of at least one request")
    return requests


def _request(index: int, row: dict[str, Any]) -> TraceRequest:
    return TraceRequest(
        index=index,
        input_length=int(row["input_length"]),
        output_length=int(row["output_length"]),
        block_ids=tuple(int(block) for block in row["hash_ids"]),
    )


def working_set_tokens(requests: list[TraceRequest]) -> int:
    """Tokens that a cache without limit would hold in the end; the last token of an output is never cached."""
    longest: dict[int, int] = {}
    for request in requests:
        for place, block in enumerate(request.block_ids):
            length = min(BLOCK_TOKENS, request.input_length - place * BLOCK_TOKENS)
            longest[block] = max(longest.get(block, 0), length)
    return sum(longest.values()) + sum(request.output_length - 1 for request in requests)


def _block_tokens(ids: np.ndarray) -> np.ndarray:
    """(blocks,) uint64 -> (blocks * 512,) int32: the finaliser of splitmix64 over (id, offset), into the vocabulary."""
    mixed: np.ndarray = (ids[:, None] * np.uint64(BLOCK_TOKENS) + np.arange(BLOCK_TOKENS, dtype=np.uint64)).ravel()
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return (mixed % np.uint64(VOCAB_SIZE)).astype(np.int32)
