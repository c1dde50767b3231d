"""The compiled programs of one model over HybridBuffers: embed, groups of layers, the head.

Groups of the same kinds of layers share one compiled program, so compiling costs a group or two whatever the depth; one
program of all layers compiles for long, and one a layer runs into the CPU client's limit of programs in flight, after
which dispatching blocks. A group's arrays are donated to it and come back written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.config.model_config import Component, ModelConfig
from app.errors import ConfigError
from app.models.array_step import ArrayStep, LayerKV, Reach, decode_step, extend_step
from app.models.decoder import DecoderLayer, Kept, LayerWeights
from app.models.families.table import decoder_of
from app.models.layer_groups import layer_groups
from app.models.layers.rope import rotation
from app.models.pool_check import check_pool
from app.models.steps import (
    DecodeRows,
    ExtendRows,
    StepTokens,
    WindowTable,
    decode_tokens,
    extend_tokens,
    last_tokens,
    places,
)
from app.models.weights_on_mesh import WeightShapes, WeightsSource
from app.tpu.hybrid_buffers import HybridBuffers
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.mesh import TENSOR_AXIS
from app.tpu.pool_layout import KVBuffers
from app.tpu.program import Program, from_host, replicated

REPLICATED = PartitionSpec()
Kinds = tuple[DecoderLayer, ...]
GroupWeights = tuple[LayerWeights[jax.Array], ...]


class DecoderWeights(NamedTuple):
    layers: GroupWeights
    embedding: jax.Array  # (vocab, embed); rows beyond the vocabulary are zero
    head: jax.Array  # (vocab, embed); the same array as `embedding` where the model ties them
    final_norm: jax.Array  # (embed,)


class StepRows(NamedTuple):
    """DecodeRows or ExtendRows, and where a model's other layers find these rows."""

    rows: Any
    window: WindowTable | None
    state_slots: jax.Array | None


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that run in one program, and the two programs, which groups of the same kinds of layers share.

    decode(its buffers, its weights, hidden, StepRows)             buffers are donated
    extend(its buffers, its weights, hidden, StepRows, max_chunk)  the same; max_chunk is static
    Both return (buffers, hidden).
    """

    layers: slice
    decode: Any
    extend: Any


class DecoderPrograms:
    """The programs of one model on one mesh, for any devices: also for such as are not there.

    All compile for each new combination of shapes.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, spec: HybridSpec, dtype: str) -> None:
        """Raises ConfigError when the mesh cannot share out the model or a pool is not of this model's shape."""
        self._config = config
        self._mesh = mesh
        self._spec = spec
        self.decoder = decoder_of(config)
        self.shapes = WeightShapes(config, self.decoder, mesh, np.dtype(jnp.dtype(dtype)))
        _check_pools(config, spec, self.shapes.num_kv_heads)
        self._dtype = jnp.dtype(dtype)
        # Replication of what psum returns is by construction; checking it would demand annotations in every loop.
        self._on_ranks = partial(jax.shard_map, mesh=mesh, check_vma=False)
        vocab = self.decoder.embedding.partition
        self._logit_shares = self._on_ranks(
            self.decoder.logits,
            in_specs=(vocab, REPLICATED, REPLICATED),
            out_specs=PartitionSpec(None, TENSOR_AXIS),
        )
        self.embed = jax.jit(self._on_ranks(self.decoder.embed, in_specs=(vocab, REPLICATED), out_specs=REPLICATED))
        self.logits = jax.jit(self._logits)
        self.last_logits = jax.jit(self._last_logits)
        self.groups = self._groups()

    def _groups(self) -> tuple[Group, ...]:
        made: dict[Kinds, Group] = {}
        groups = []
        for layers in layer_groups(self.decoder.layers):
            kinds = self.decoder.layers[layers]
            if kinds not in made:
                decode = jax.jit(partial(self._decode, kinds=kinds), donate_argnums=0)
                extend = jax.jit(partial(self._extend, kinds=kinds), donate_argnums=0, static_argnames="max_chunk")
                made[kinds] = Group(layers, decode, extend)
            groups.append(replace(made[kinds], layers=layers))
        return tuple(groups)

    def load(self, source: WeightsSource, progress: Callable[[str, float], None]) -> DecoderWeights:
        """Every weight from the source, on the mesh. progress: told what is loaded, how far (0 to 1)."""
        decoder, num_layers = self.decoder, len(self.decoder.layers)
        layers = []
        for index, layer in enumerate(decoder.layers):
            progress(f"layer {index + 1} of {num_layers}", index / num_layers)
            layers.append(jax.tree.map(partial(self.shapes.place, source, layer=index), layer.plans))
        place = partial(self.shapes.place, source)
        embedding = place(decoder.embedding)
        head = embedding if decoder.head is None else place(decoder.head)
        return DecoderWeights(tuple(layers), embedding, head, place(decoder.final_norm))

    def buffers_of(self, buffers: HybridBuffers, group: Group) -> HybridBuffers:
        """Those of the group's layers."""
        full, window, recurrent = (self._among(component, group.layers) for component in Component)
        return HybridBuffers(
            KVBuffers(buffers.full.keys[full], buffers.full.values[full]),
            KVBuffers(buffers.window.keys[window], buffers.window.values[window]),
            buffers.states[recurrent],
        )

    def programs(self, *, batch: int, width: int, window_width: int, num_tokens: int, max_chunk: int) -> list[Program]:
        """All that a decode of `batch` rows and an extend of as many call.

        Page tables are `width` pages wide, and for sliding windows `window_width`; an extend's chunks have up to
        `max_chunk` tokens, `num_tokens` together.
        """
        mesh = self._mesh
        row, tokens = replicated(mesh, (batch,), jnp.int32), replicated(mesh, (num_tokens,), jnp.int32)
        table = replicated(mesh, (batch, width), jnp.int32)
        chunk = from_host((batch,), jnp.int32)
        decode = self._abstract_rows(DecodeRows(chunk, table), batch, window_width)
        extend = self._abstract_rows(ExtendRows(chunk, chunk, chunk, table), batch, window_width)
        embedding, head, norm = (
            self.shapes.abstract(plan)
            for plan in (self.decoder.embedding, self.decoder.head or self.decoder.embedding, self.decoder.final_norm)
        )
        one, many = self._hidden(batch), self._hidden(num_tokens)
        return [
            Program(name="embed_tokens", function=self.embed, arguments=(embedding, row)),
            Program(name="embed_chunks", function=self.embed, arguments=(embedding, tokens)),
            *self._decodes(one, decode),
            *self._extends(many, extend, max_chunk),
            Program(name="logits", function=self.logits, arguments=(head, norm, one)),
            Program(name="last_logits", function=self.last_logits, arguments=(head, norm, many, extend.rows)),
        ]

    def _decodes(self, hidden: Any, rows: StepRows) -> Iterator[Program]:
        for name, group, held, weights in self._patterns():
            arguments = (held, weights, hidden, rows)
            yield Program(name=f"decode_{name}", function=group.decode, arguments=arguments, donated=(held,))

    def _extends(self, hidden: Any, rows: StepRows, max_chunk: int) -> Iterator[Program]:
        statics = {"max_chunk": max_chunk}
        for name, group, held, weights in self._patterns():
            arguments = (held, weights, hidden, rows)
            yield Program(
                name=f"extend_{name}", function=group.extend, arguments=arguments, statics=statics, donated=(held,)
            )

    def _patterns(self) -> Iterator[tuple[str, Group, Any, Any]]:
        """Once for each pattern of layers: a name, a group of it, its buffers and weights as shapes."""
        buffers = self._spec.abstract(self._mesh)
        by_pattern = {self.decoder.layers[group.layers]: group for group in reversed(self.groups)}
        for kinds, group in by_pattern.items():
            weights = tuple(jax.tree.map(self.shapes.abstract, kind.plans) for kind in kinds)
            name = f"layers_{group.layers.start}_to_{group.layers.stop - 1}"
            yield name, group, self.buffers_of(buffers, group), weights

    def _hidden(self, num_tokens: int) -> Any:
        return replicated(self._mesh, (num_tokens, self._config.hidden_size), self._dtype)

    def _abstract_rows(self, rows: Any, batch: int, window_width: int) -> StepRows:
        row = from_host((batch,), jnp.int32)
        table = replicated(self._mesh, (batch, window_width), jnp.int32)
        components = self._config.components
        window = WindowTable(table, row) if Component.SWA in components else None
        return StepRows(rows, window, row if Component.RECURRENT in components else None)

    def _among(self, component: Component, layers: slice) -> slice:
        """Where these layers stand among those that have this component."""
        having = [component in layer.components for layer in self.decoder.layers]
        return slice(sum(having[: layers.start]), sum(having[: layers.stop]))

    def _decode(
        self, held: HybridBuffers, weights: GroupWeights, hidden: jax.Array, rows: StepRows, *, kinds: Kinds
    ) -> tuple[HybridBuffers, jax.Array]:
        def share(
            held: HybridBuffers, weights: GroupWeights, hidden: jax.Array, rows: StepRows
        ) -> tuple[HybridBuffers, jax.Array]:
            tokens = decode_tokens(rows.rows)
            step = decode_step(self._rotations(kinds, tokens), _reaches(held, rows, tokens), rows.state_slots)
            return _through(kinds, held, weights, hidden, step)

        return self._on_shares(share, kinds, held, weights, hidden, rows)

    def _extend(
        self,
        held: HybridBuffers,
        weights: GroupWeights,
        hidden: jax.Array,
        rows: StepRows,
        *,
        kinds: Kinds,
        max_chunk: int,
    ) -> tuple[HybridBuffers, jax.Array]:
        def share(
            held: HybridBuffers, weights: GroupWeights, hidden: jax.Array, rows: StepRows
        ) -> tuple[HybridBuffers, jax.Array]:
            tokens = extend_tokens(rows.rows, hidden.shape[0])
            rotations, reaches = self._rotations(kinds, tokens), _reaches(held, rows, tokens)
            step = extend_step(rotations, reaches, rows.state_slots, rows.rows, max_chunk)
            return _through(kinds, held, weights, hidden, step)

        return self._on_shares(share, kinds, held, weights, hidden, rows)

    def _rotations(self, kinds: Kinds, tokens: StepTokens) -> Mapping[Any, Any]:
        ropes = {rope for kind in kinds for mixer in kind.mixers for rope in mixer.ropes}
        return {rope: rotation(tokens.positions, rope) for rope in ropes}

    def _on_shares(
        self,
        share: Callable[..., tuple[HybridBuffers, jax.Array]],
        kinds: Kinds,
        held: HybridBuffers,
        weights: GroupWeights,
        hidden: jax.Array,
        rows: StepRows,
    ) -> tuple[HybridBuffers, jax.Array]:
        of_buffers = self._spec.partitions(len(held.states))
        of_weights = tuple(jax.tree.map(lambda plan: plan.partition, kind.plans) for kind in kinds)
        on_ranks = self._on_ranks(
            share,
            in_specs=(of_buffers, of_weights, REPLICATED, REPLICATED),
            out_specs=(of_buffers, REPLICATED),
        )
        return on_ranks(held, weights, hidden, rows)

    def _logits(self, head: jax.Array, final_norm: jax.Array, hidden: jax.Array) -> jax.Array:
        shares = self._logit_shares(head, final_norm, hidden)
        whole = jax.lax.with_sharding_constraint(shares, NamedSharding(self._mesh, REPLICATED))
        return whole[:, : self._config.vocab_size]

    def _last_logits(self, head: jax.Array, final_norm: jax.Array, hidden: jax.Array, rows: ExtendRows) -> jax.Array:
        return self._logits(head, final_norm, hidden[last_tokens(rows)])


def _reaches(held: HybridBuffers, rows: StepRows, tokens: StepTokens) -> dict[Component, Reach]:
    """For the kinds of attention that the group has."""
    reaches = {}
    if held.full.keys:
        reaches[Component.FULL] = Reach(rows.rows, places(tokens, rows.rows, held.full.keys[0]))
    if held.window.keys:
        seen = rows.rows.through(rows.window)
        reaches[Component.SWA] = Reach(seen, places(tokens, seen, held.window.keys[0]))
    return reaches


def _through(
    kinds: Kinds, held: HybridBuffers, weights: GroupWeights, hidden: jax.Array, step: ArrayStep
) -> tuple[HybridBuffers, jax.Array]:
    # A jit within the program: equal layers are traced and lowered once, which is most of starting from a warm cache.
    run = {kind: jax.jit(lambda own, hidden, kept, kind=kind: kind.run(own, hidden, kept, step)) for kind in set(kinds)}
    arrays: dict[Component, Iterator[Any]] = {
        Component.FULL: iter(_layers_of(held.full)),
        Component.SWA: iter(_layers_of(held.window)),
        Component.RECURRENT: iter(held.states),
    }
    after: dict[str, list[Any]] = {component.value: [] for component in Component}
    for kind, own in zip(kinds, weights, strict=True):
        kept: Kept = {component.value: next(arrays[component]) for component in kind.components}
        hidden, kept = run[kind](own, hidden, kept)
        for name, array in kept.items():
            after[name].append(array)
    full, window, states = (after[component.value] for component in Component)
    return HybridBuffers(_buffers_of(full), _buffers_of(window), tuple(states)), hidden


def _layers_of(buffers: KVBuffers) -> list[LayerKV]:
    return [LayerKV(*pair) for pair in zip_longest(buffers.keys, buffers.values)]


def _buffers_of(layers: list[LayerKV]) -> KVBuffers:
    return KVBuffers(tuple(kv.keys for kv in layers), tuple(kv.values for kv in layers if kv.values is not None))


def _check_pools(config: ModelConfig, spec: HybridSpec, num_kv_heads: int) -> None:
    """num_kv_heads: over all ranks."""
    heads = 1 if config.latent_kv else num_kv_heads
    for component, field, pool in (
        (Component.FULL, "pool_spec", spec.full),
        (Component.SWA, "window_pool_spec", spec.window),
        (Component.RECURRENT, "state_spec", spec.states),
    ):
        if bool(config.layers_with(component)) != (pool is not None):
            allowed = f"one exactly for models with {component.value} layers"
            raise ConfigError(field=field, value=pool, allowed=allowed)
    for component, field, pool in (
        (Component.FULL, "pool_spec", spec.full),
        (Component.SWA, "window_pool_spec", spec.window),
    ):
        if pool is not None:
            check_pool(field, pool, len(config.layers_with(component)), heads, config.head_dim)
    if spec.states is not None:
        needed = (len(config.layers_with(Component.RECURRENT)), config.recurrent_state)
        if needed != (spec.states.num_layers, spec.states.arrays):
            raise ConfigError(field="state_spec", value=spec.states, allowed=f"layers and arrays of {needed}")
