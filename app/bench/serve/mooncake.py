"""The workload `mooncake`: requests of a Mooncake trace, made shorter, sent as token ids.

A trace says which prompts begin alike in blocks of 512 tokens of its own, and has no tokens. Here every block keeps the
first `length_scale` of its tokens, the partial one at a prompt's end too, and a reply the same part of its length. So
prompts that share n of the trace's blocks share n scaled blocks, and the shared part of a prompt stays what it was, up
to the rounding of one block (512 * length_scale, rounded; make it a multiple of the page size to lose none to pages).
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np

from app.bench.serve.conversation import Conversation, Turn, Workload
from app.bench.trace import BLOCK_TOKENS, TraceRequest, read_mooncake_trace
from app.errors import ConfigError


def mooncake_workload(
    path: Path,
    *,
    num_requests: int | None,
    length_scale: float,
    max_prompt_tokens: int | None,
    context_length: int,
    vocab_size: int,
) -> Workload:
    """The first `num_requests` of the trace (None: all), each a conversation of one turn.

    Prompts longer than `max_prompt_tokens`, or than the context leaves beside the reply, are cut after a whole block.
    Raises ConfigError for a file that is no trace, and when not even one block fits.
    """
    requests = _read(path, num_requests)
    arrivals = _arrival_times(path, len(requests))
    kept_of_block = max(1, round(BLOCK_TOKENS * length_scale))
    conversations = []
    num_cut = 0
    for request, arrival_s in zip(requests, arrivals, strict=True):
        max_tokens = max(1, round(request.output_length * length_scale))
        limit = min(context_length - max_tokens, max_prompt_tokens or context_length)
        token_ids = _scaled_prompt(request, length_scale) % vocab_size
        if token_ids.size > limit:
            token_ids = token_ids[: limit // kept_of_block * kept_of_block]
            num_cut += 1
        if not token_ids.size:
            raise ConfigError(
                field="max_prompt_tokens" if max_prompt_tokens is not None else "length_scale",
                value=max_prompt_tokens if max_prompt_tokens is not None else length_scale,
                allowed=f"room for a prompt of {kept_of_block} tokens and a reply of {max_tokens} within the server's "
                f"context of {context_length}; request {request.index} has no room",
            )
        turn = Turn(max_tokens=max_tokens, token_ids=token_ids)
        conversations.append(Conversation(name=f"request-{request.index}", turns=(turn,), arrival_s=arrival_s))
    notes = (f"{num_cut} of {len(requests)} prompts were cut to fit",) if num_cut else ()
    return Workload(name="mooncake", conversations=tuple(conversations), notes=notes)


def _scaled_prompt(request: TraceRequest, length_scale: float) -> np.ndarray:
    """(tokens,) int32: what is kept of each of the trace's blocks."""
    prompt = request.token_ids()[: request.input_length]
    parts = [prompt[start : start + BLOCK_TOKENS] for start in range(0, prompt.size, BLOCK_TOKENS)]
    return np.concatenate([part[: max(1, round(part.size * length_scale))] for part in parts] or [prompt])


def _read(path: Path, num_requests: int | None) -> list[TraceRequest]:
    try:
        requests = read_mooncake_trace(path, num_requests if num_requests is not None else 1 << 31)
    except ConfigError as error:  # it names the flag of another command
        raise ConfigError(**{**error.fields, "field": "data"}) from error
    for request in requests:
        if not 0 < request.input_length <= BLOCK_TOKENS * len(request.block_ids):
            raise ConfigError(
                field="data",
                value=str(path),
                allowed=f"a Mooncake trace, but line {request.index + 1} has input_length={request.input_length} "
                f"and {len(request.block_ids)} hash_ids",
            )
    return requests


def _arrival_times(path: Path, count: int) -> list[float]:
    """Seconds after the first request."""
    try:
        with path.open(encoding="utf-8") as lines:
            seconds = [float(json.loads(line)["timestamp"]) / 1e3 for line in islice(lines, count)]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            field="data", value=str(path), allowed=f"a Mooncake trace with a timestamp on each line ({error!r})"
        ) from error
    return [second - seconds[0] for second in seconds]
