"""The Llama family as pure functions over weights: llama, mistral without a window, qwen2, qwen3.

One layer function serves all of them; what they differ by are optional weights (biases, query and key norms) and the
rope's frequencies. The functions run on one rank's share of heads, FFN columns and vocabulary, inside `shard_map`;
sums over ranks are written out, two a layer. Matrices are (out, in) as Hugging Face stores them: nothing is
transposed on loading, and XLA's CPU backend reads them faster that way when few tokens are multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from app.config.model_config import ModelConfig
from app.models.layers.norms import rms_norm
from app.models.layers.rope import rotate
from app.tpu.mesh import TENSOR_AXIS

Array = TypeVar("Array")
KV = TypeVar("KV")

FEW_TOKENS = 64  # up to here the CPU backend is quicker with the matrix on the left; from 128 on it is slower

# Logical axis -> mesh axis; None is held whole by every rank.
MESH_AXES: Mapping[str, str | None] = MappingProxyType(
    {
        "vocab": TENSOR_AXIS,
        "heads": TENSOR_AXIS,
        "kv_heads": TENSOR_AXIS,
        "ffn": TENSOR_AXIS,
        "embed": None,
        "head_dim": None,
    }
)


class LayerWeights(NamedTuple):
    """One layer; heads = num_heads * head_dim, kv_heads = num_kv_heads * head_dim. None where a model has none."""

    input_norm: jax.Array  # (embed,)
    q: jax.Array  # (heads, embed)
    k: jax.Array  # (kv_heads, embed)
    v: jax.Array  # (kv_heads, embed)
    o: jax.Array  # (embed, heads)
    ffn_norm: jax.Array  # (embed,)
    gate: jax.Array  # (ffn, embed)
    up: jax.Array  # (ffn, embed)
    down: jax.Array  # (embed, ffn)
    q_bias: jax.Array | None = None  # (heads,)
    k_bias: jax.Array | None = None  # (kv_heads,)
    v_bias: jax.Array | None = None  # (kv_heads,)
    q_norm: jax.Array | None = None  # (head_dim,)
    k_norm: jax.Array | None = None  # (head_dim,)


class ModelWeights(NamedTuple):
    layers: tuple[LayerWeights, ...]
    embedding: jax.Array  # (vocab, embed); rows beyond the vocabulary are zero
    head: jax.Array  # (vocab, embed); the same array as `embedding` where the model ties them
    final_norm: jax.Array  # (embed,)


class TensorPlan(NamedTuple):
    """Where a weight comes from and how it is cut."""

    name: str  # Hugging Face's; {} is the layer
    axes: tuple[str, ...]  # logical


_LAYER_PLANS = {
    "input_norm": TensorPlan("model.layers.{}.input_layernorm.weight", ("embed",)),
    "q": TensorPlan("model.layers.{}.self_attn.q_proj.weight", ("heads", "embed")),
    "k": TensorPlan("model.layers.{}.self_attn.k_proj.weight", ("kv_heads", "embed")),
    "v": TensorPlan("model.layers.{}.self_attn.v_proj.weight", ("kv_heads", "embed")),
    "o": TensorPlan("model.layers.{}.self_attn.o_proj.weight", ("embed", "heads")),
    "ffn_norm": TensorPlan("model.layers.{}.post_attention_layernorm.weight", ("embed",)),
    "gate": TensorPlan("model.layers.{}.mlp.gate_proj.weight", ("ffn", "embed")),
    "up": TensorPlan("model.layers.{}.mlp.up_proj.weight", ("ffn", "embed")),
    "down": TensorPlan("model.layers.{}.mlp.down_proj.weight", ("embed", "ffn")),
}
_BIAS_PLANS = {
    "q_bias": TensorPlan("model.layers.{}.self_attn.q_proj.bias", ("heads",)),
    "k_bias": TensorPlan("model.layers.{}.self_attn.k_proj.bias", ("kv_heads",)),
    "v_bias": TensorPlan("model.layers.{}.self_attn.v_proj.bias", ("kv_heads",)),
}
_QK_NORM_PLANS = {
    "q_norm": TensorPlan("model.layers.{}.self_attn.q_norm.weight", ("head_dim",)),
    "k_norm": TensorPlan("model.layers.{}.self_attn.k_norm.weight", ("head_dim",)),
}
EMBEDDING_PLAN = TensorPlan("model.embed_tokens.weight", ("vocab", "embed"))
HEAD_PLAN = TensorPlan("lm_head.weight", ("vocab", "embed"))
FINAL_NORM_PLAN = TensorPlan("model.norm.weight", ("embed",))


def layer_plans(config: ModelConfig) -> dict[str, TensorPlan]:
    """Field of LayerWeights -> its plan, for the fields that this model has."""
    plans = dict(_LAYER_PLANS)
    if config.attention_bias:
        plans |= _BIAS_PLANS
    if config.qk_norm:
        plans |= _QK_NORM_PLANS
    return plans


def layer_of(fields: Mapping[str, Array]) -> LayerWeights:
    """LayerWeights whose leaves are whatever the mapping holds: arrays, or their partitions."""
    return LayerWeights(**fields)  # type: ignore[arg-type]


def partition(axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*(MESH_AXES[axis] for axis in axes))


# How a driver stores and attends: T new tokens' unscaled queries (T, heads, head_dim), keys and values (T, kv_heads,
# head_dim), and whatever the driver holds a layer's KV in -> attended (T, heads * head_dim), the KV with theirs.
Attend = Callable[[jax.Array, jax.Array, jax.Array, KV], tuple[jax.Array, KV]]
Rotation = tuple[jax.Array, jax.Array]  # cosines and sines of T positions, (T, 1, head_dim // 2) float32 each


def layer(
    weights: LayerWeights, hidden: jax.Array, kv: KV, rotation: Rotation, attend: Attend[KV], config: ModelConfig
) -> tuple[jax.Array, KV]:
    """One decoder layer over T tokens, (T, embed) -> (hidden, kv). `attend` writes their KV first and attends after."""
    normed = rms_norm(hidden, weights.input_norm, config.rms_norm_eps)
    q = _heads(normed, weights.q, weights.q_bias, weights.q_norm, config)
    k = _heads(normed, weights.k, weights.k_bias, weights.k_norm, config)
    v = _linear(normed, weights.v, weights.v_bias)
    attended, kv = attend(rotate(q, *rotation), rotate(k, *rotation), v.reshape(k.shape), kv)
    hidden = hidden + _summed(_linear(attended, weights.o))
    normed = rms_norm(hidden, weights.ffn_norm, config.rms_norm_eps)
    inner = jax.nn.silu(_linear(normed, weights.gate)) * _linear(normed, weights.up)
    return hidden + _summed(_linear(inner, weights.down)), kv


def embed(embedding: jax.Array, token_ids: jax.Array) -> jax.Array:
    """(T,) int32 -> (T, embed). Each rank looks up the ids that its share of the vocabulary has."""
    own = token_ids - jax.lax.axis_index(TENSOR_AXIS) * embedding.shape[0]
    here = (own >= 0) & (own < embedding.shape[0])
    rows = embedding[jnp.where(here, own, 0)]
    return _summed(jnp.where(here[:, None], rows, 0))


def logits(head: jax.Array, final_norm: jax.Array, hidden: jax.Array, config: ModelConfig) -> jax.Array:
    """(rows, embed) -> (rows, this rank's share of the vocabulary) float32."""
    normed = rms_norm(hidden, final_norm, config.rms_norm_eps)
    return _product(normed, head, jnp.float32)


def _heads(
    normed: jax.Array, matrix: jax.Array, bias: jax.Array | None, norm: jax.Array | None, config: ModelConfig
) -> jax.Array:
    projected = _linear(normed, matrix, bias).reshape(normed.shape[0], -1, config.head_dim)
    return projected if norm is None else rms_norm(projected, norm, config.rms_norm_eps)


def _linear(x: jax.Array, matrix: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    product = _product(x, matrix, x.dtype)
    return product if bias is None else product + bias


def _product(x: jax.Array, matrix: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """(T, in) by (out, in) -> (T, out) of type `dtype`."""
    if x.shape[0] > FEW_TOKENS:
        return _rows_first(x, matrix, dtype)
    return jax.lax.platform_dependent(
        x, matrix, cpu=partial(_matrix_first, dtype=dtype), default=partial(_rows_first, dtype=dtype)
    )


def _rows_first(x: jax.Array, matrix: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum("ti,oi->to", x, matrix, preferred_element_type=dtype)


def _matrix_first(x: jax.Array, matrix: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The same with the large operand on the left, which XLA's CPU backend reads up to twice as fast for few tokens.

    The barrier keeps XLA from folding the transpose away, and the order of the operands with it.
    """
    product = jnp.einsum("oi,ti->ot", matrix, x, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(product).T


def _summed(partial: jax.Array) -> jax.Array:
    """The sum over ranks. XLA's CPU backend would keep the all-reduce of one rank, at the cost of fusing around it."""
    return partial if jax.lax.axis_size(TENSOR_AXIS) == 1 else jax.lax.psum(partial, TENSOR_AXIS)
