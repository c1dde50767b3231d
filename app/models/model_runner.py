"""The Llama family on a device mesh, as a runtime calls it.

A step is a handful of programs: embed, then groups of layers, then the head. Groups of the same size share one
compiled program, so compiling costs one group whatever the depth; one program of all layers compiles for long and one
a layer runs into the CPU client's limit of programs in flight, after which dispatching blocks. The group's pool arrays
are donated to it and come back written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.config.model_config import ModelConfig
from app.core.ports import DecodeInputs, ExtendInputs, PoolSpec
from app.errors import RuntimeClosedError
from app.models import llama
from app.models.layers.attention import PageReader, decode_attention, extend_attention, separate_arrays
from app.models.layers.rope import inverse_frequencies, rotation
from app.models.llama import LayerWeights, ModelWeights
from app.models.steps import DecodeRows, ExtendRows, TokenPlaces, decode_places, extend_places, last_tokens
from app.models.weights_on_mesh import WeightShapes, WeightsSource, kv_heads_on_mesh
from app.tpu.kv_pool import write_tokens
from app.tpu.mesh import TENSOR_AXIS
from app.tpu.pool_layout import ArrayPerLayer, KVBuffers

MAX_GROUPS = 4  # layer programs a call: two steps that decode, extend and sample stay below the CPU client's 32
REPLICATED = PartitionSpec()


class LlamaModelRunner:
    """A ModelRunner for llama, mistral (without a window), qwen2 and qwen3.

    Owns the weights, never the pool: its arrays are donated to every call and the replacements returned. Inputs must be
    device arrays, or numpy arrays that nobody changes afterwards. Not thread-safe: one thread dispatches.
    Compiles for each new combination of batch bucket, page-table width and chunk bucket.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights_source: WeightsSource,
        mesh: Mesh,
        pool_spec: PoolSpec,
        dtype: str = "float32",
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """dtype: of weights and activations, "float32" or "bfloat16". progress: told what is loaded, how far (0 to 1).

        Raises ConfigError when the mesh cannot share out the model or the pool is not of this model's shape.
        """
        self._config = config
        self._source = weights_source
        self._progress = progress or (lambda what, fraction: None)
        num_kv_heads = kv_heads_on_mesh(config, mesh.shape[TENSOR_AXIS], pool_spec)
        self._shapes = WeightShapes(config, mesh, num_kv_heads, np.dtype(jnp.dtype(dtype)))
        self._groups = layer_groups(config.num_layers)
        self._programs = _Programs(config, mesh)
        self._weights: ModelWeights | None = None

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def load(self) -> None:
        """Read every weight from the source and place its shards. Idempotent; waits for the copies."""
        if self._weights is None:
            self._weights = jax.block_until_ready(self._load())
            self._progress("weights", 1.0)

    def close(self) -> None:
        """Drop the weights; `load` brings them back. Idempotent."""
        self._weights = None

    def decode(self, buffers: KVBuffers, inputs: DecodeInputs) -> tuple[KVBuffers, jax.Array]:
        """-> (buffers, logits (B, vocab_size) float32). B >= 2; one token a row."""
        weights = self._loaded()
        hidden = self._programs.embed(weights.embedding, inputs.token_ids)
        rows = (inputs.lengths, inputs.page_table)
        buffers, hidden = self._run_groups(self._programs.decode, weights, buffers, hidden, rows)
        return buffers, self._programs.logits(weights.head, weights.final_norm, hidden)

    def extend(self, buffers: KVBuffers, inputs: ExtendInputs) -> tuple[KVBuffers, jax.Array]:
        """-> (buffers, logits (S, vocab_size) float32 of each row's last token). T >= 2."""
        weights = self._loaded()
        hidden = self._programs.embed(weights.embedding, inputs.token_ids)
        rows = (inputs.chunk_starts, inputs.chunk_lengths, inputs.prefix_lengths, inputs.page_table)
        program = partial(self._programs.extend, max_chunk=inputs.max_chunk)
        buffers, hidden = self._run_groups(program, weights, buffers, hidden, rows)
        return buffers, self._programs.last_logits(weights.head, weights.final_norm, hidden, *rows)

    def _run_groups(
        self,
        program: Callable[..., tuple[KVBuffers, jax.Array]],
        weights: ModelWeights,
        buffers: KVBuffers,
        hidden: jax.Array,
        rows: tuple[jax.Array, ...],
    ) -> tuple[KVBuffers, jax.Array]:
        keys: tuple[jax.Array, ...] = ()
        values: tuple[jax.Array, ...] = ()
        for group in self._groups:
            held = KVBuffers(buffers.keys[group], buffers.values[group])
            written, hidden = program(held, weights.layers[group], hidden, *rows)
            keys, values = keys + written.keys, values + written.values
        return KVBuffers(keys, values), hidden

    def _loaded(self) -> ModelWeights:
        if self._weights is None:
            raise RuntimeClosedError(action="run the model without its weights")
        return self._weights

    def _load(self) -> ModelWeights:
        config = self._config
        place = partial(self._shapes.place, self._source)
        plans = llama.layer_plans(config)
        layers = []
        for index in range(config.num_layers):
            self._progress(f"layer {index + 1} of {config.num_layers}", index / config.num_layers)
            layers.append(llama.layer_of({field: place(plan, index) for field, plan in plans.items()}))
        embedding = place(llama.EMBEDDING_PLAN)
        head = embedding if config.tie_word_embeddings else place(llama.HEAD_PLAN)
        return ModelWeights(tuple(layers), embedding, head, place(llama.FINAL_NORM_PLAN))


def layer_groups(num_layers: int) -> tuple[slice, ...]:
    """The layers of each program: at most MAX_GROUPS, equal where the count allows, since each size compiles anew."""
    least = -(-num_layers // MAX_GROUPS)
    size = next((size for size in range(least, least * 3 // 2 + 1) if num_layers % size == 0), least)
    return tuple(slice(first, min(first + size, num_layers)) for first in range(0, num_layers, size))


class _LayerKV(NamedTuple):
    """One layer's arrays."""

    keys: jax.Array
    values: jax.Array


class _Programs:
    """The compiled programs of one model on one mesh: each the same function on every rank's share."""

    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        self._config = config
        self._frequencies = inverse_frequencies(config)
        self._replicated = NamedSharding(mesh, REPLICATED)
        plans = llama.layer_plans(config)
        self._layer_partition = llama.layer_of({field: llama.partition(plan.axes) for field, plan in plans.items()})
        # Replication of what psum returns is by construction; checking it would demand annotations in every loop.
        self._on_ranks = partial(jax.shard_map, mesh=mesh, check_vma=False)
        vocab = llama.partition(llama.EMBEDDING_PLAN.axes)
        self._logit_shares = self._on_ranks(
            partial(llama.logits, config=config),
            in_specs=(vocab, REPLICATED, REPLICATED),
            out_specs=PartitionSpec(None, TENSOR_AXIS),
        )
        self.embed = jax.jit(self._on_ranks(llama.embed, in_specs=(vocab, REPLICATED), out_specs=REPLICATED))
        self.decode = jax.jit(self._decode, donate_argnums=0)
        self.extend = jax.jit(self._extend, donate_argnums=0, static_argnames="max_chunk")
        self.logits = jax.jit(self._logits)
        self.last_logits = jax.jit(self._last_logits)

    def _decode(
        self, buffers: KVBuffers, layers: tuple[LayerWeights, ...], hidden: jax.Array, *rows: jax.Array
    ) -> tuple[KVBuffers, jax.Array]:
        """rows: lengths (B,), page_table (B, max_pages)."""
        return self._on_shares(self._decode_share, layers, rows)(buffers, layers, hidden, *rows)

    def _extend(
        self, buffers: KVBuffers, layers: tuple[LayerWeights, ...], hidden: jax.Array, *rows: jax.Array, max_chunk: int
    ) -> tuple[KVBuffers, jax.Array]:
        """rows: chunk_starts, chunk_lengths, prefix_lengths (S,), page_table (S, max_pages)."""
        share = partial(self._extend_share, max_chunk=max_chunk)
        return self._on_shares(share, layers, rows)(buffers, layers, hidden, *rows)

    def _on_shares(
        self, share: Callable[..., Any], layers: tuple[LayerWeights, ...], rows: tuple[jax.Array, ...]
    ) -> Callable[..., tuple[KVBuffers, jax.Array]]:
        layer_partitions = (self._layer_partition,) * len(layers)
        return self._on_ranks(
            share,
            in_specs=(ArrayPerLayer.partition, layer_partitions, REPLICATED, *(REPLICATED,) * len(rows)),
            out_specs=(ArrayPerLayer.partition, REPLICATED),
        )

    def _decode_share(
        self, buffers: KVBuffers, layers: tuple[LayerWeights, ...], hidden: jax.Array, *rows: jax.Array
    ) -> tuple[KVBuffers, jax.Array]:
        step = DecodeRows(*rows)
        places = decode_places(step, buffers.keys[0])

        def attend(query: jax.Array, layer: PageReader) -> jax.Array:
            return decode_attention(query, layer, step.page_table, step.lengths)

        return self._through(buffers, layers, hidden, places, attend)

    def _extend_share(
        self, buffers: KVBuffers, layers: tuple[LayerWeights, ...], hidden: jax.Array, *rows: jax.Array, max_chunk: int
    ) -> tuple[KVBuffers, jax.Array]:
        step = ExtendRows(*rows)
        places = extend_places(step, hidden.shape[0], buffers.keys[0])

        def attend(query: jax.Array, layer: PageReader) -> jax.Array:
            return extend_attention(query, layer, step, max_chunk)

        return self._through(buffers, layers, hidden, places, attend)

    def _through(
        self,
        buffers: KVBuffers,
        layers: tuple[LayerWeights, ...],
        hidden: jax.Array,
        places: TokenPlaces,
        attend: Callable[[jax.Array, PageReader], jax.Array],
    ) -> tuple[KVBuffers, jax.Array]:
        config = self._config
        turns = rotation(places.positions, self._frequencies)

        def write_and_attend(q: jax.Array, k: jax.Array, v: jax.Array, kv: _LayerKV) -> tuple[jax.Array, _LayerKV]:
            flat = (k.shape[0], -1)
            keys = write_tokens(kv.keys, places.pages, places.offsets, k.reshape(flat))
            values = write_tokens(kv.values, places.pages, places.offsets, v.reshape(flat))
            attended = attend(q * config.head_dim**-0.5, separate_arrays(keys, values, config.head_dim))
            return attended, _LayerKV(keys, values)

        # A jit within the program: all layers are traced and lowered once, which is most of starting from a warm cache.
        @jax.jit
        def layer(weights: LayerWeights, hidden: jax.Array, kv: _LayerKV) -> tuple[jax.Array, _LayerKV]:
            return llama.layer(weights, hidden, kv, turns, write_and_attend, config)

        written = []
        for weights, kv in zip(layers, map(_LayerKV, buffers.keys, buffers.values), strict=True):
            hidden, kv = layer(weights, hidden, kv)
            written.append(kv)
        return KVBuffers(tuple(kv.keys for kv in written), tuple(kv.values for kv in written)), hidden

    def _logits(self, head: jax.Array, final_norm: jax.Array, hidden: jax.Array) -> jax.Array:
        shares = self._logit_shares(head, final_norm, hidden)
        return jax.lax.with_sharding_constraint(shares, self._replicated)[:, : self._config.vocab_size]

    def _last_logits(self, head: jax.Array, final_norm: jax.Array, hidden: jax.Array, *rows: jax.Array) -> jax.Array:
        return self._logits(head, final_norm, hidden[last_tokens(ExtendRows(*rows))])
