"""Models whose layers are all alike over a flat pool, as one program a call: the way for TPU.

The pool is one array that the layers hand on, so that XLA writes it in place. The layers are those that run over an
array for each layer elsewhere (decoder_programs.py).
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

from app.config.model_config import Component, ModelConfig
from app.core.ports import PoolSpec
from app.errors import ConfigError
from app.models.decoder import Kept, LayerWeights, Recurrence
from app.models.families.table import decoder_of
from app.models.layer_runs import LayerRun, Parts
from app.models.layers.attention import Scores
from app.models.layers.flat_attention import Attend, FlatAttention, FlatKV
from app.models.layers.rope import Rope, Rotation, rotation
from app.models.pool_check import check_pool
from app.models.steps import DecodeRows, ExtendRows, TokenPlaces, decode_places, extend_places, last_tokens
from app.models.weight_plan import TensorPlan
from app.models.weights_on_mesh import WeightShapes, WeightsSource
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

    def one(self, plan: TensorPlan, layer: int | None) -> Any:
        return self.shapes.abstract(plan)

    def stack(self, plan: TensorPlan, num_layers: int) -> Any:
        return self.shapes.abstract_stack(plan, num_layers)


@dataclass(frozen=True, slots=True)
class _Arrays:
    """Parts that are arrays on the mesh."""

    shapes: WeightShapes
    source: WeightsSource
    loading: Callable[[], None]  # told before each

    def one(self, plan: TensorPlan, layer: int | None) -> jax.Array:
        self.loading()
        return self.shapes.place(self.source, plan, layer)

    def stack(self, plan: TensorPlan, num_layers: int) -> jax.Array:
        self.loading()
        return self.shapes.place_stack(self.source, plan, num_layers)


class _Partitions:
    """Parts that are partitions over the mesh's axes."""

    def one(self, plan: TensorPlan, layer: int | None) -> PartitionSpec:
        return plan.partition

    def stack(self, plan: TensorPlan, num_layers: int) -> PartitionSpec:
        return plan.stacked_partition


@dataclass(frozen=True, slots=True)
class FlatStep:
    """A Step for layers that all have full attention."""

    rotations: dict[Rope, Rotation]
    write_and_attend: Attend

    def turns(self, rope: Rope) -> Rotation:
        return self.rotations[rope]

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kept: Kept, scores: Scores, sinks: jax.Array | None
    ) -> tuple[jax.Array, Kept]:
        attended, kv = self.write_and_attend(q, k, v, kept[Component.FULL.value], scores)
        return attended, {Component.FULL.value: kv}

    def attend_latent(
        self, q: jax.Array, latent: jax.Array, kept: Kept, scores: Scores, value_dim: int
    ) -> tuple[jax.Array, Kept]:
        raise NotImplementedError  # FlatPrograms refuses such models

    def recur(self, recurrence: Recurrence, x: jax.Array, kept: Kept) -> tuple[jax.Array, Kept]:
        raise NotImplementedError  # the same


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
        """Raises ConfigError for layers that are not alike or keep more than keys and values of every token; when the
        mesh cannot share out the model; and when the pool is not of this model's shape.
        """
        self._config = config
        self._decoder = decoder_of(config)
        _check_alike(config, len(set(self._decoder.layers)))
        self._mesh = mesh
        self._spec = pool_spec
        self._attention = attention
        self._layer_run = layer_run
        self.shapes = WeightShapes(config, self._decoder, mesh, np.dtype(jnp.dtype(dtype)))
        check_pool("pool_spec", pool_spec, config.num_layers, self.shapes.num_kv_heads, config.head_dim)
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
            statics={"max_chunk": self.told_apart(max_chunk)},
            donated=(buffers,),
        )

    def told_apart(self, max_chunk: int) -> int:
        """What `extend` is to be called with for that: programs that would be equal become one."""
        return self._attention.told_apart(max_chunk)

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
        decoder = self._decoder
        return FlatWeights(
            layers=self._layer_run.parts(decoder.layers[0].plans, len(decoder.layers), parts),
            embedding=parts.one(decoder.embedding, None),
            head=None if decoder.head is None else parts.one(decoder.head, None),
            final_norm=parts.one(decoder.final_norm, None),
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
        attend: Attend,
    ) -> tuple[FlatKVBuffers, jax.Array]:
        decoder = self._decoder
        step = FlatStep({rope: rotation(places.positions, rope) for rope in decoder.ropes}, attend)

        def run_layer(
            own: LayerWeights[jax.Array], index: jax.Array, hidden: jax.Array, pool: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            kept: Kept = {Component.FULL.value: FlatKV(pool, index)}
            hidden, kept = decoder.layers[0].run(own, hidden, kept, step)
            return hidden, kept[Component.FULL.value].pool

        hidden = decoder.embed(weights.embedding, token_ids)
        hidden, pool = self._layer_run.run(weights.layers, self._config.num_layers, run_layer, hidden, buffers.pages)
        return FlatKVBuffers(pool), hidden

    def _logits(self, weights: FlatWeights, hidden: jax.Array) -> jax.Array:
        head = weights.embedding if weights.head is None else weights.head
        return self._decoder.logits(head, weights.final_norm, hidden)


def _check_alike(config: ModelConfig, num_kinds: int) -> None:
    if config.components != {Component.FULL} or config.latent_kv or config.attention_sinks or num_kinds > 1:
        allowed = "over a flat pool only models whose layers are all alike, with full attention to keys and values"
        raise ConfigError(field="model", value=config.architecture, allowed=allowed)


def _row_after_row(sharding: jax.sharding.Sharding) -> Format:
    """A matrix whose rows lie whole. TPUs store it by columns where that pads less, and every look-up would copy it."""
    return Format(Layout(major_to_minor=(0, 1)), sharding)
