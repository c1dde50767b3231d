"""Compile one decode step with each way of laying out the KV pool, for TPUs that are not there; print what it costs.

    .venv-tpu/bin/python -m benchmarks.tpu_layouts v5e:2x2 tpu7x:2x2x1

Needs the extra `tpu` (`make test-tpu` makes .venv-tpu). One device, bfloat16, a pool of 8 layers, 64 rows of up to
4,096 tokens, pages of 16. The layer function is the one that is served; only what holds the pool differs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.sharding import Mesh, PartitionSpec

from app.config.model_config import Component, ModelConfig
from app.core.ports import PoolSpec
from app.models.decoder import Kept
from app.models.families.table import decoder_of
from app.models.flat_programs import FlatPrograms, FlatStep
from app.models.layer_runs import LoopOverLayers
from app.models.layers.attention import Scores, decode_attention, separate_arrays
from app.models.layers.flat_attention import FlatAttention, FlatKV
from app.models.layers.gather_attention import GatherAttention
from app.models.layers.ragged_attention import RaggedAttention
from app.models.layers.rope import rotation
from app.models.steps import DecodeRows, TokenPlaces, decode_places
from app.tpu.compiled import CompiledFacts, compile_facts
from app.tpu.kv_pool import write_tokens
from app.tpu.program import Program, replicated
from app.tpu.targets import find_target

ROWS, WIDTH, PAGES = 64, 256, 8191
SHAPES = {"32 heads, 8 KV heads of 128": (32, 8, 128), "9 heads, 3 KV heads of 64": (9, 3, 64)}

# (layer weights, hidden, pool, token places, rows) -> (hidden, pool)
Driver = Callable[[Any, jax.Array, Any, TokenPlaces, DecodeRows], tuple[jax.Array, Any]]


class Bench:
    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.spec = PoolSpec(
            num_pages=PAGES,
            page_size=16,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype="bfloat16",
        )
        self._weights = FlatPrograms(config, mesh, self.spec, GatherAttention(self.spec), LoopOverLayers(), "bfloat16")

    def compile(self, name: str, driver: Driver, pool: Any) -> CompiledFacts:
        layers = self._weights.abstract_weights().layers
        hidden = replicated(self.mesh, (ROWS, self.config.hidden_size), jnp.bfloat16)
        rows = DecodeRows(replicated(self.mesh, (ROWS,), jnp.int32), replicated(self.mesh, (ROWS, WIDTH), jnp.int32))

        def step(pool: Any, layers: Any, hidden: jax.Array, rows: DecodeRows) -> Any:
            places = decode_places(rows, jax.ShapeDtypeStruct((PAGES + 1, 16), jnp.bfloat16))
            return driver(layers, hidden, pool, places, rows)

        nowhere = PartitionSpec()
        on_device = jax.shard_map(step, mesh=self.mesh, in_specs=nowhere, out_specs=nowhere, check_vma=False)
        program = Program(
            name=name,
            function=jax.jit(on_device, donate_argnums=0),
            arguments=(pool, layers, hidden, rows),
            donated=(pool,),
        )
        return compile_facts(program, self.mesh)

    def array(self, *shape: int) -> Any:
        return replicated(self.mesh, shape, jnp.bfloat16)

    def layer(self, weights: Any, hidden: jax.Array, kv: Any, places: TokenPlaces, attend: Any) -> Any:
        decoder = decoder_of(self.config)
        step = FlatStep({rope: rotation(places.positions, rope) for rope in decoder.ropes}, attend)
        kept: Kept = {Component.FULL.value: kv}
        hidden, kept = decoder.layers[0].run(weights, hidden, kept, step)
        return hidden, kept[Component.FULL.value]

    def carried(self, attention: FlatAttention) -> Driver:
        """A loop over layers that carries one flat pool: what is served."""

        def drive(layers: Any, hidden: jax.Array, pool: Any, places: TokenPlaces, rows: DecodeRows) -> Any:
            attend = attention.decode(rows, places)

            def run(index: jax.Array, state: Any) -> Any:
                hidden, kv = self.layer(_of(layers, index), state[0], FlatKV(state[1], index), places, attend)
                return hidden, kv.pool

            return jax.lax.fori_loop(0, self.config.num_layers, run, (hidden, pool))

        return drive

    def scanned(self, attention: FlatAttention) -> Driver:
        """A scan that takes the pool apart by layers and puts it together again."""

        def drive(layers: Any, hidden: jax.Array, pool: Any, places: TokenPlaces, rows: DecodeRows) -> Any:
            attend = attention.decode(rows, places)

            def run(hidden: jax.Array, both: Any) -> Any:
                hidden, kv = self.layer(both[0], hidden, FlatKV(both[1], jnp.int32(0)), places, attend)
                return hidden, kv.pool

            return jax.lax.scan(run, hidden, (layers, pool))

        return drive

    def sliced(self, attention: FlatAttention) -> Driver:
        """A loop that carries a pool with an axis of layers, takes a layer out of it and puts it back."""

        def drive(layers: Any, hidden: jax.Array, pool: Any, places: TokenPlaces, rows: DecodeRows) -> Any:
            attend = attention.decode(rows, places)

            def run(index: jax.Array, state: Any) -> Any:
                kv = FlatKV(_of(state[1], index), jnp.int32(0))
                hidden, kv = self.layer(_of(layers, index), state[0], kv, places, attend)
                return hidden, jax.lax.dynamic_update_index_in_dim(state[1], kv.pool, index, 0)

            return jax.lax.fori_loop(0, self.config.num_layers, run, (hidden, pool))

        return drive

    def unrolled(self, attention: FlatAttention) -> Driver:
        """Layers one after another, each with an array of its own."""

        def drive(layers: Any, hidden: jax.Array, pool: Any, places: TokenPlaces, rows: DecodeRows) -> Any:
            attend = attention.decode(rows, places)
            written = []
            for index, own in enumerate(pool):
                kv = FlatKV(own, jnp.int32(0))
                hidden, kv = self.layer(jax.tree.map(lambda leaf: leaf[index], layers), hidden, kv, places, attend)  # noqa: B023
                written.append(kv.pool)
            return hidden, tuple(written)

        return drive

    def apart(self, layers: Any, hidden: jax.Array, pool: Any, places: TokenPlaces, rows: DecodeRows) -> Any:
        """As on CPU: layers one after another, keys and values apart."""

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, kv: Any, scores: Scores) -> Any:
            kv = tuple(
                write_tokens(array, places.pages, places.offsets, new.reshape(ROWS, -1))
                for array, new in zip(kv, (k, v), strict=True)
            )
            layer = separate_arrays(*kv, self.config.head_dim)
            return decode_attention(q, layer, rows, scores), kv

        written = []
        for index, own in enumerate(pool):
            weights = jax.tree.map(lambda leaf: leaf[index], layers)  # noqa: B023
            hidden, kv = self.layer(weights, hidden, own, places, attend)
            written.append(kv)
        return hidden, tuple(written)


def _of(layers: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False), layers)


def candidates(bench: Bench) -> dict[str, tuple[Driver, Any]]:
    spec, layers, pages = bench.spec, bench.spec.num_layers, PAGES + 1
    wide = (16, 2 * spec.num_kv_heads * spec.head_dim)
    lines = (16, 2 * spec.num_kv_heads, spec.head_dim)
    half = bench.array(pages, 16, spec.num_kv_heads * spec.head_dim)
    gather, ragged = GatherAttention(spec), RaggedAttention(spec, 1, ragged_paged_attention)
    found: dict[str, tuple[Driver, Any]] = {
        "array a layer, keys and values apart, unrolled": (bench.apart, ((half, half),) * layers),
        "array a layer, wide, unrolled": (bench.unrolled(gather), (bench.array(pages, *wide),) * layers),
        "flat, wide, carried": (bench.carried(gather), bench.array(layers * pages, *wide)),
        "flat, wide, scanned": (bench.scanned(gather), bench.array(layers, pages, *wide)),
        "axis of layers, wide, sliced": (bench.sliced(gather), bench.array(layers, pages, *wide)),
    }
    if spec.head_dim == 128:
        found |= {
            "array a layer, by head, unrolled": (bench.unrolled(ragged), (bench.array(pages, *lines),) * layers),
            "flat, by head, carried": (bench.carried(ragged), bench.array(layers * pages, *lines)),
            "flat, by head, scanned": (bench.scanned(ragged), bench.array(layers, pages, *lines)),
            "axis of layers, by head, sliced": (bench.sliced(ragged), bench.array(layers, pages, *lines)),
        }
    return found


def main(targets: list[str]) -> None:
    for target in targets:
        for shape, heads in SHAPES.items():
            config = ModelConfig(
                architecture="llama",
                vocab_size=1024,
                hidden_size=2048,
                intermediate_size=5632,
                num_layers=8,
                num_heads=heads[0],
                num_kv_heads=heads[1],
                head_dim=heads[2],
                context_length=4096,
            )
            bench = Bench(config, find_target(target).mesh(1))
            pool_bytes = (PAGES + 1) * bench.spec.page_bytes
            print(f"\n{target}, {shape}, a pool of {pool_bytes / 1e6:,.0f} MB\n")
            print("| layout and driver | temporaries MB | accessed MB | in place MB | seconds |\n|---|---|---|---|---|")
            for name, (driver, pool) in candidates(bench).items():
                print(_line(name, partial(bench.compile, name, driver, pool)), flush=True)


def _line(name: str, compile_it: Callable[[], CompiledFacts]) -> str:
    try:
        facts = compile_it()
    except jax.errors.JaxRuntimeError as error:
        return f"| {name} | does not compile: {str(error).splitlines()[0][:80]} | | | |"
    sizes = (facts.temp_bytes, facts.accessed_bytes, facts.alias_bytes)
    return f"| {name} | {' | '.join(f'{size / 1e6:,.1f}' for size in sizes)} | {facts.seconds:.0f} |"


if __name__ == "__main__":
    main(sys.argv[1:])
