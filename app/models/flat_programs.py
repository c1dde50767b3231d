"""The Llama family over a flat pool as one program a call, the way for TPU.

The pool is one array that the layers hand on, so that XLA writes it in place. The layer function is the one that CPU
runs over an array a layer (model_runner.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.config.model_config import ModelConfig
from app.core.ports import PoolSpec
from app.models import llama
from app.models.layer_runs import LayerRun, Parts
from app.models.layers.flat_attention import FlatAttention, FlatKV
from app.models.layers.rope import inverse_frequencies, rotation
from app.models.llama import Attend, LayerWeights
from app.models.steps import DecodeRows, ExtendRows, TokenPlaces, decode_places, extend_places, last_tokens
from app.models.weights_on_mesh import WeightShapes, WeightsSource, kv_heads_on_mesh, stacked_partition
from app.tpu.mesh import TENSOR_AXIS
from app.tpu.pool_layout import FlatKVBuffers
from app.tpu.program import Program, from_host, replicated

REPLICATED = PartitionSpec()


class FlatWeights(NamedTuple):
    layers: Any  # LayerWeights, as the LayerRun wants them
    embedding: jax.Array  # (vocab, embed); rows beyond the vocabulary are zero
    head: jax.Array | None  # the same; None where the model ties it to `embedding`
    final_norm: jax.Array  # (embed,)


@dataclass(frozen=True, slots=True)
class _Shapes:
    """Parts that are shapes, types and shardings."""

    shapes: WeightShapes

    def one(self, plan: llama.TensorPlan, layer: int | None) -> Any:
        return self.shapes.abstract(plan)

    def stack(self, plan: llama.TensorPlan) -> Any:
        return self.shapes.abstract_stack(plan)


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Parts that are arrays on the mesh."""

    shapes: WeightShapes
    source: WeightsSource
    loading: Callable[[], None]  # told before each

    def one(self, plan: llama.TensorPlan, layer: int | None) -> jax.Array:
        self.loading()
        return self.shapes.place(self.source, plan, layer)

    def stack(self, plan: llama.TensorPlan) -> jax.Array:
        self.loading()
        return self.shapes.place_stack(self.source, plan)


class _Partitions:
    """Parts that are partitions over the mesh's axes."""

    def one(self, plan: llama.TensorPlan, layer: int | None) -> PartitionSpec:
        return llama.partition(plan.axes)

    def stack(self, plan: llama.TensorPlan) -> PartitionSpec:
        return stacked_partition(plan.axes)


class FlatPrograms:
    """The two programs of one model on one mesh, for any devices: also for such as are not there.

    decode(weights, buffers, token_ids, *DecodeRows)             buffers are donated
    extend(weights, buffers, token_ids, *ExtendRows, max_chunk)  buffers are donated; max_chunk is static
    Both return (buffers, logits). They compile for each new combination of shapes.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        pool_spec: PoolSpec,
        attention: FlatAttention,
        layer_run: LayerRun,
        dtype: str,
    ) -> None:
        """Raises ConfigError when the mesh cannot share out the model or the pool is not of this model's shape."""
        self._config = config
        self._mesh = mesh
        self._spec = pool_spec
        self._attention = attention
        self._layer_run = layer_run
        self._frequencies = inverse_frequencies(config)
        num_kv_heads = kv_heads_on_mesh(config, mesh.shape[TENSOR_AXIS], pool_spec)
        self.shapes = WeightShapes(config, mesh, num_kv_heads, np.dtype(jnp.dtype(dtype)))
        self.decode = jax.jit(self._decode, donate_argnums=1)
        self.extend = jax.jit(self._extend, donate_argnums=1, static_argnames="max_chunk")

    def abstract_weights(self) -> FlatWeights:
        """Shapes, types and shardings of what `load` brings."""
        weights = self._weights(_Shapes(self.shapes))
        rows: Any = weights.embedding
        by_row: Any = jax.ShapeDtypeStruct(rows.shape, rows.dtype, sharding=_row_after_row(rows.sharding))
        return weights._replace(embedding=by_row)

    def abstract_buffers(self) -> Any:
        """Shapes, types and shardings of the pool's arrays."""
        return self._attention.layout.abstract(self._spec, self._mesh)

    def decode_program(self, *, batch: int, width: int) -> Program:
        """One token for each of `batch` rows whose page tables are `width` pages wide."""
        weights, buffers = self.abstract_weights(), self.abstract_buffers()
        row = replicated(self._mesh, (batch,), jnp.int32)  # a device array: the last step's tokens
        rows = (from_host((batch,), jnp.int32), replicated(self._mesh, (batch, width), jnp.int32))
        return Program(
            name="decode", function=self.decode, arguments=(weights, buffers, row, *rows), donated=(buffers,)
        )

    def extend_program(self, *, batch: int, num_tokens: int, max_chunk: int, width: int) -> Program:
        """Chunks of up to `max_chunk` tokens, `num_tokens` together, for `batch` rows."""
        weights, buffers = self.abstract_weights(), self.abstract_buffers()
        tokens, row = from_host((num_tokens,), jnp.int32), from_host((batch,), jnp.int32)
        rows = (row, row, row, replicated(self._mesh, (batch, width), jnp.int32))
        return Program(
            name="prefill",
            function=self.extend,
            arguments=(weights, buffers, tokens, *rows),
            statics={"max_chunk": max_chunk},
            donated=(buffers,),
        )

    def load(self, source: WeightsSource, progress: Callable[[str, float], None]) -> FlatWeights:
        """Every weight from the source, on the mesh. progress: told what is loaded, how far (0 to 1)."""
        num_arrays = len(jax.tree.leaves(self._weights(_Shapes(self.shapes))))
        loaded = count()

        def loading() -> None:
            number = next(loaded)
            progress(f"weights {number + 1} of {num_arrays}", number / num_arrays)

        weights = self._weights(_Arrays(self.shapes, source, loading))
        by_row = jax.device_put(weights.embedding, _row_after_row(weights.embedding.sharding))
        return weights._replace(embedding=by_row)

    def _weights(self, parts: Parts) -> FlatWeights:
        return FlatWeights(
            layers=self._layer_run.parts(llama.layer_plans(self._config), self._config.num_layers, parts),
            embedding=parts.one(llama.EMBEDDING_PLAN, None),
            head=None if self._config.tie_word_embeddings else parts.one(llama.HEAD_PLAN, None),
            final_norm=parts.one(llama.FINAL_NORM_PLAN, None),
        )

    def _decode(
        self, weights: FlatWeights, buffers: FlatKVBuffers, token_ids: jax.Array, *rows: jax.Array
    ) -> tuple[FlatKVBuffers, jax.Array]:
        def share(
            weights: FlatWeights, buffers: FlatKVBuffers, token_ids: jax.Array, *rows: jax.Array
        ) -> tuple[FlatKVBuffers, jax.Array]:
            step = DecodeRows(*rows)
            places = decode_places(step, buffers.pages)
            buffers, hidden = self._through(weights, buffers, token_ids, places, self._attention.decode(step, places))
            return buffers, self._logits(weights, hidden)

        return self._on_ranks(share, weights, buffers, token_ids, rows)

    def _extend(
        self, weights: FlatWeights, buffers: FlatKVBuffers, token_ids: jax.Array, *rows: jax.Array, max_chunk: int
    ) -> tuple[FlatKVBuffers, jax.Array]:
        def share(
            weights: FlatWeights, buffers: FlatKVBuffers, token_ids: jax.Array, *rows: jax.Array
        ) -> tuple[FlatKVBuffers, jax.Array]:
            step = ExtendRows(*rows)
            places = extend_places(step, token_ids.size, buffers.pages)
            attend = self._attention.extend(step, places, max_chunk)
            buffers, hidden = self._through(weights, buffers, token_ids, places, attend)
            return buffers, self._logits(weights, hidden[last_tokens(step)])

        return self._on_ranks(share, weights, buffers, token_ids, rows)

    def _on_ranks(
        self,
        share: Callable[..., tuple[FlatKVBuffers, jax.Array]],
        weights: FlatWeights,
        buffers: FlatKVBuffers,
        token_ids: jax.Array,
        rows: tuple[jax.Array, ...],
    ) -> tuple[FlatKVBuffers, jax.Array]:
        partitions = self._weights(_Partitions())
        # Replication of what psum returns is by construction; checking it would demand annotations in every loop.
        program = jax.shard_map(
            share,
            mesh=self._mesh,
            in_specs=(partitions, self._attention.layout.partition, REPLICATED, *(REPLICATED,) * len(rows)),
            out_specs=(self._attention.layout.partition, PartitionSpec(None, TENSOR_AXIS)),
            check_vma=False,
        )
        buffers, shares = program(weights, buffers, token_ids, *rows)
        whole = jax.lax.with_sharding_constraint(shares, NamedSharding(self._mesh, REPLICATED))
        return buffers, whole[:, : self._config.vocab_size]

    def _through(
        self,
        weights: FlatWeights,
        buffers: FlatKVBuffers,
        token_ids: jax.Array,
        places: TokenPlaces,
        attend: Attend[FlatKV],
    ) -> tuple[FlatKVBuffers, jax.Array]:
        turns = rotation(places.positions, self._frequencies)

        def run_layer(
            own: LayerWeights, index: jax.Array, hidden: jax.Array, pool: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            hidden, kv = llama.layer(own, hidden, FlatKV(pool, index), turns, attend, self._config)
            return hidden, kv.pool

        hidden = llama.embed(weights.embedding, token_ids)
        hidden, pool = self._layer_run.run(weights.layers, self._config.num_layers, run_layer, hidden, buffers.pages)
        return FlatKVBuffers(pool), hidden

    def _logits(self, weights: FlatWeights, hidden: jax.Array) -> jax.Array:
        head = weights.embedding if weights.head is None else weights.head
        return llama.logits(head, weights.final_norm, hidden, self._config)


def _row_after_row(sharding: jax.sharding.Sharding) -> Format:
    """A matrix whose rows lie whole. TPUs store it by columns where that pads less, and every look-up would copy it."""
    return Format(Layout(major_to_minor=(0, 1)), sharding)
