"""Which attention serves a model on a platform, by its shapes alone: the table that `tpukv doctor` prints.

| kind | platform | stores | serves |
|---|---|---|---|
| rows | cpu | ArrayPerLayer | every shape |
| ragged | tpu | FlatByHead | heads of 128 and KV heads that fill tiles, or what padding by a third at most makes so |
| gather | tpu | FlatWide | every other shape |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

RAGGED_HEAD_DIM = 128  # the kernel compiles for no other
_MOST_PADDING = 1 / 3  # of the real size: beyond that the memory is worth more than the kernel
_ELEMENTS_A_WORD = {"float32": 1, "bfloat16": 2}


class AttentionKind(enum.Enum):
    ROWS = "rows"  # XLA, row by row over one layer's arrays
    RAGGED = "ragged"  # JAX's ragged paged attention, a Pallas kernel
    GATHER = "gather"  # XLA, row by row over gathered pages of one array


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionChoice:
    kind: AttentionKind
    reason: str
    extra_kv_heads: int = 0  # zeros that the pool stores, over all ranks
    extra_head_dim: int = 0


def choose_attention(
    *, platform: str, num_kv_heads: int, head_dim: int, tp_size: int, pool_dtype: str, dtype: str
) -> AttentionChoice:
    """num_kv_heads: over all ranks, after replication; dtype: of activations; pool_dtype: as the pool stores them."""
    if platform == "cpu":
        return AttentionChoice(kind=AttentionKind.ROWS, reason="on cpu every shape is served row by row")
    if pool_dtype != dtype:
        return _gather(f"the kernel wants one type, and {dtype} queries meet a {pool_dtype} pool")
    if head_dim > RAGGED_HEAD_DIM:
        return _gather(f"the kernel has no head_dim of {head_dim}")
    heads = num_kv_heads // tp_size
    stored_heads = _whole_tiles(heads, _ELEMENTS_A_WORD[pool_dtype])
    padding = stored_heads * RAGGED_HEAD_DIM / (heads * head_dim) - 1
    shape = f"{heads} KV heads of {head_dim} a rank"
    if padding > _MOST_PADDING:
        stored = f"{stored_heads} of {RAGGED_HEAD_DIM}"
        return _gather(f"the kernel would store {shape} as {stored}, {padding:.0%} more memory")
    return AttentionChoice(
        kind=AttentionKind.RAGGED,
        reason=f"the kernel serves {shape}" + (f", padded to {stored_heads} of {RAGGED_HEAD_DIM}" if padding else ""),
        extra_kv_heads=(stored_heads - heads) * tp_size,
        extra_head_dim=RAGGED_HEAD_DIM - head_dim,
    )


def _gather(reason: str) -> AttentionChoice:
    return AttentionChoice(kind=AttentionKind.GATHER, reason=reason)


def _whole_tiles(num_kv_heads: int, elements_a_word: int) -> int:
    """The least count, at least `num_kv_heads`, whose keys and values fill registers: 1, 2, 4 or 8n words of them."""
    heads = num_kv_heads
    while True:
        words, rest = divmod(2 * heads, elements_a_word)
        if not rest and (words in (1, 2, 4) or words % 8 == 0):
            return heads
        heads += 1
