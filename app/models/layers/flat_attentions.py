"""From the choice of an attention to the attention, for those that read a flat pool."""

from __future__ import annotations

from app.core.ports import PoolSpec
from app.models.layers.attention_choice import AttentionKind
from app.models.layers.flat_attention import FlatAttention
from app.models.layers.gather_attention import GatherAttention
from app.models.layers.ragged_attention import RaggedAttention


def flat_attention(kind: AttentionKind, spec: PoolSpec, num_ranks: int) -> FlatAttention:
    """spec: of the pool, with the padding that the choice asked for. KeyError for a kind that reads no flat pool."""
    return _MAKERS[kind](spec, num_ranks)


def _ragged(spec: PoolSpec, num_ranks: int) -> FlatAttention:
    # Here, because it loads Pallas and its compiler, which nothing else needs.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    return RaggedAttention(spec, num_ranks, ragged_paged_attention)


def _gather(spec: PoolSpec, num_ranks: int) -> FlatAttention:
    return GatherAttention(spec)


_MAKERS = {AttentionKind.RAGGED: _ragged, AttentionKind.GATHER: _gather}
