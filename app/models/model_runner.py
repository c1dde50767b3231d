"""The Llama family on a device mesh, as a runtime calls it.

A step is a handful of programs: embed, then groups of layers, then the head. Groups of the same size share one
compiled program, so compiling costs one group whatever the depth; one program of all layers compiles for long and one
a layer runs into the CPU client's limit of programs in flight, after which dispatching blocks. The group's pool arrays
are donated to it and come back written in place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.config.model_config import Component, ModelConfig
from app.config.parallel import padded_kv_heads
from app.core.ports import DecodeInputs, ExtendInputs, PoolSpec
from app.errors import ConfigError, RuntimeClosedError
from app.models import llama
from app.models.layers.attention import decode_attention, extend_attention
from app.models.layers.rope import inverse_frequencies, rotation
from app.models.llama import Attend, LayerWeights, ModelWeights, TensorPlan, TokenPlace
from app.tpu.kv_pool import POOL_PARTITION, KVBuffers, locate
from app.tpu.mesh import TENSOR_AXIS

MAX_GROUPS = 4  # layer programs a call: two steps that decode, extend and sample stay below the CPU client's 32
REPLICATED = PartitionSpec()


class WeightsSource(Protocol):
    def tensor(self, name: str) -> np.ndarray:
        """The weight of that Hugging Face name, (out, in) for matrices, any float type. Raises KeyError."""
        ...


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
        self._mesh = mesh
        self._dtype = np.dtype(jnp.dtype(dtype))
        self._progress = progress or (lambda what, fraction: None)
        self._num_kv_heads = _check(config, mesh.shape[TENSOR_AXIS], pool_spec)
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
        chunks = (inputs.chunk_starts, inputs.chunk_lengths)
        rows = (*chunks, inputs.prefix_lengths, inputs.page_table)
        program = partial(self._programs.extend, max_chunk=inputs.max_chunk)
        buffers, hidden = self._run_groups(program, weights, buffers, hidden, rows)
        return buffers, self._programs.last_logits(weights.head, weights.final_norm, hidden, *chunks)

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
        plans = llama.layer_plans(config)
        layers = []
        for index in range(config.num_layers):
            self._progress(f"layer {index + 1} of {config.num_layers}", index / config.num_layers)
            layers.append(llama.layer_of({field: self._place(plan, index) for field, plan in plans.items()}))
        embedding = self._place(llama.EMBEDDING_PLAN)
        head = embedding if config.tie_word_embeddings else self._place(llama.HEAD_PLAN)
        return ModelWeights(tuple(layers), embedding, head, self._place(llama.FINAL_NORM_PLAN))

    def _place(self, plan: TensorPlan, layer: int | None = None) -> jax.Array:
        """One weight on the mesh, replicated and padded as its axes ask. The source's array is copied, not kept."""
        tensor = np.array(self._source.tensor(plan.name.format(layer)), dtype=self._dtype)
        if plan.axes[0] == "kv_heads":
            copies = self._num_kv_heads // self._config.num_kv_heads
            tensor = llama.replicate_heads(tensor, self._config.head_dim, copies)
        if plan.axes[0] == "vocab":
            missing = -tensor.shape[0] % self._mesh.shape[TENSOR_AXIS]
            tensor = np.pad(tensor, ((0, missing), (0, 0)))
        return jax.device_put(tensor, NamedSharding(self._mesh, llama.partition(plan.axes)))


def layer_groups(num_layers: int) -> tuple[slice, ...]:
    """The layers of each program: at most MAX_GROUPS, equal where the count allows, since each size compiles anew."""
    least = -(-num_layers // MAX_GROUPS)
    size = next((size for size in range(least, least * 3 // 2 + 1) if num_layers % size == 0), least)
    return tuple(slice(first, min(first + size, num_layers)) for first in range(0, num_layers, size))


def _check(config: ModelConfig, tp_size: int, spec: PoolSpec) -> int:
    """-> KV heads over all ranks."""
    if Component.SWA in config.components:
        raise ConfigError(field="model", value=config.architecture, allowed="sliding windows are not supported yet")
    num_kv_heads = padded_kv_heads(config.num_heads, config.num_kv_heads, tp_size)
    if config.intermediate_size % tp_size:
        allowed = f"the model's intermediate size {config.intermediate_size} must divide evenly"
        raise ConfigError(field="--tp-size", value=tp_size, allowed=allowed)
    shape = (config.num_layers, num_kv_heads, config.head_dim)
    if shape != (spec.num_layers, spec.num_kv_heads, spec.head_dim):
        allowed = f"the model needs layers, KV heads and head_dim of {shape}"
        raise ConfigError(field="pool_spec", value=spec, allowed=allowed)
    return num_kv_heads


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
            in_specs=(POOL_PARTITION, layer_partitions, REPLICATED, *(REPLICATED,) * len(rows)),
            out_specs=(POOL_PARTITION, REPLICATED),
        )

    def _decode_share(
        self,
        buffers: KVBuffers,
        layers: tuple[LayerWeights, ...],
        hidden: jax.Array,
        lengths: jax.Array,
        page_table: jax.Array,
    ) -> tuple[KVBuffers, jax.Array]:
        positions = lengths - 1
        pages, offsets = locate(page_table, jnp.arange(lengths.size), positions, lengths > 0, buffers.keys[0])
        place = TokenPlace(pages, offsets, *rotation(positions, self._frequencies))
        attend = partial(decode_attention, page_table=page_table, lengths=lengths)
        return self._through(buffers, layers, hidden, place, attend)

    def _extend_share(
        self,
        buffers: KVBuffers,
        layers: tuple[LayerWeights, ...],
        hidden: jax.Array,
        chunk_starts: jax.Array,
        chunk_lengths: jax.Array,
        prefix_lengths: jax.Array,
        page_table: jax.Array,
        max_chunk: int,
    ) -> tuple[KVBuffers, jax.Array]:
        index = jnp.arange(hidden.shape[0])
        inside = (index >= chunk_starts[:, None]) & (index < (chunk_starts + chunk_lengths)[:, None])  # (S, T)
        valid, rows = inside.any(axis=0), inside.argmax(axis=0)
        positions = prefix_lengths[rows] + index - chunk_starts[rows]
        pages, offsets = locate(page_table, rows, positions, valid, buffers.keys[0])
        place = TokenPlace(pages, offsets, *rotation(positions, self._frequencies))
        attend = partial(
            extend_attention,
            page_table=page_table,
            chunk_starts=chunk_starts,
            chunk_lengths=chunk_lengths,
            prefix_lengths=prefix_lengths,
            max_chunk=max_chunk,
        )
        return self._through(buffers, layers, hidden, place, attend)

    def _through(
        self,
        buffers: KVBuffers,
        layers: tuple[LayerWeights, ...],
        hidden: jax.Array,
        place: TokenPlace,
        attend: Attend,
    ) -> tuple[KVBuffers, jax.Array]:
        # A jit within the program: all layers are traced and lowered once, which is most of starting from a warm cache.
        @jax.jit
        def layer(
            weights: LayerWeights, hidden: jax.Array, keys: jax.Array, values: jax.Array
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            return llama.layer(weights, hidden, keys, values, place, attend, self._config)

        written_keys, written_values = [], []
        for weights, keys, values in zip(layers, buffers.keys, buffers.values, strict=True):
            hidden, keys, values = layer(weights, hidden, keys, values)
            written_keys.append(keys)
            written_values.append(values)
        return KVBuffers(tuple(written_keys), tuple(written_values)), hidden

    def _logits(self, head: jax.Array, final_norm: jax.Array, hidden: jax.Array) -> jax.Array:
        shares = self._logit_shares(head, final_norm, hidden)
        return jax.lax.with_sharding_constraint(shares, self._replicated)[:, : self._config.vocab_size]

    def _last_logits(
        self,
        head: jax.Array,
        final_norm: jax.Array,
        hidden: jax.Array,
        chunk_starts: jax.Array,
        chunk_lengths: jax.Array,
    ) -> jax.Array:
        last = jnp.maximum(chunk_starts + chunk_lengths - 1, 0)
        return self._logits(head, final_norm, hidden[last])
