"""Run in a process of its own with 8 CPU devices: pages of several data-parallel ranks in one array. Prints JSON.

An array of the pool gets a leading axis of ranks, cut over the mesh's "data" axis, and every rank names pages by ids of
its own. Inside `shard_map` a rank sees what a pool of its own would be, and the pool's functions serve it as they are.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.models.layers.attention import Scores, decode_attention, separate_arrays
from app.models.steps import DecodeRows
from app.tpu.kv_pool import locate, read_pages, write_tokens
from app.tpu.mesh import DATA_AXIS, TENSOR_AXIS
from tests.support.tensor_parallel_check import COLLECTIVES, pointers

PAGES, PAGE_SIZE, HEADS, HEAD_DIM = 12, 4, 8, 4
ROWS, TOKENS, WIDTH = 3, 10, 4  # rows a rank, tokens a row, pages a row
LENGTHS = np.array([10, 7, 0], np.int32)
SHARD = PartitionSpec(DATA_AXIS, None, None, TENSOR_AXIS)
RANK = PartitionSpec(DATA_AXIS)
HEADS_OF_RANK = PartitionSpec(DATA_AXIS, None, TENSOR_AXIS)


def write(pool: jax.Array, table: jax.Array, values: jax.Array) -> jax.Array:
    """One rank's share: pool (PAGES + 1, PAGE_SIZE, width), table (ROWS, WIDTH), values (ROWS * TOKENS, width)."""
    rows, positions = jnp.repeat(jnp.arange(ROWS), TOKENS), jnp.tile(jnp.arange(TOKENS), ROWS)
    pages, offsets = locate(table, rows, positions, positions < jnp.asarray(LENGTHS)[rows], pool)
    return write_tokens(pool, pages, offsets, values)


def read(pool: jax.Array, table: jax.Array) -> jax.Array:
    return jnp.stack([read_pages(pool, table[row]) for row in range(ROWS)])


def attend(pool: jax.Array, table: jax.Array, queries: jax.Array) -> jax.Array:
    """The pool's array as keys and as values; queries (ROWS, heads, HEAD_DIM)."""
    rows = DecodeRows(jnp.asarray(LENGTHS), table)
    return decode_attention(queries, separate_arrays(pool, pool, HEAD_DIM), rows, Scores(scale=1.0))


def inputs(dp_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tables, values, queries of every rank. Page ids are local: ranks use the same ones for different tokens."""
    rng = np.random.default_rng(0)
    tables = np.stack([rng.permutation(PAGES)[: ROWS * WIDTH].reshape(ROWS, WIDTH) + 1 for _ in range(dp_size)])
    values = rng.standard_normal((dp_size, ROWS * TOKENS, HEADS * HEAD_DIM)).astype(np.float32)
    queries = rng.standard_normal((dp_size, ROWS, HEADS, HEAD_DIM)).astype(np.float32)
    return tables.astype(np.int32), values, queries


def run(dp_size: int, tp_size: int, dtype: str) -> dict[str, Any]:
    mesh = Mesh(np.array(jax.devices()).reshape(dp_size, tp_size), (DATA_AXIS, TENSOR_AXIS))
    tables, values, queries = inputs(dp_size)

    def on_ranks(function: Any, out: PartitionSpec, *more: PartitionSpec) -> Any:
        def one(*shares: jax.Array) -> jax.Array:
            return function(*(share[0] for share in shares))[None]

        return jax.shard_map(one, mesh=mesh, in_specs=(SHARD, RANK, *more), out_specs=out, check_vma=False)

    def placed(array: np.ndarray, partition: PartitionSpec) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, partition))

    shape = (dp_size, PAGES + 1, PAGE_SIZE, HEADS * HEAD_DIM)
    pool = jnp.zeros(shape, dtype, device=NamedSharding(mesh, SHARD))
    before = pointers(pool)
    table, tokens = placed(tables, RANK), placed(values, HEADS_OF_RANK)
    heads = placed(queries, PartitionSpec(DATA_AXIS, None, TENSOR_AXIS, None))
    writing = jax.jit(on_ranks(write, SHARD, HEADS_OF_RANK), donate_argnums=0)
    reading = jax.jit(on_ranks(read, PartitionSpec(DATA_AXIS, None, None, TENSOR_AXIS)))
    attending = jax.jit(on_ranks(attend, HEADS_OF_RANK, PartitionSpec(DATA_AXIS, None, TENSOR_AXIS, None)))
    programs = {
        "write": writing.lower(pool, table, tokens),
        "read": reading.lower(pool, table),
        "attend": attending.lower(pool, table, heads),
    }
    written = writing(pool, table, tokens)
    singles = [alone(tables[rank], values[rank], queries[rank], dtype) for rank in range(dp_size)]
    attended = np.asarray(attending(written, table, heads))
    return {
        "collectives": {name: COLLECTIVES.findall(each.compile().as_text()) for name, each in programs.items()},
        "collectives_of_global_ids": collectives_of_global_ids(mesh, shape, dtype),
        "same_place": pointers(written) == before,
        "old_deleted": pool.is_deleted(),
        "pages_equal": bool(np.array_equal(written, np.stack([single[0] for single in singles]))),
        "read_equal": bool(np.array_equal(reading(written, table), np.stack([single[1] for single in singles]))),
        "attention_error": float(np.abs(attended - np.stack([single[2] for single in singles])).max()),
    }


def alone(table: np.ndarray, values: np.ndarray, queries: np.ndarray, dtype: str) -> tuple[jax.Array, ...]:
    """One rank's pages, what is read of them and what is attended, on one device without the others."""
    pool = jax.jit(write)(jnp.zeros((PAGES + 1, PAGE_SIZE, HEADS * HEAD_DIM), dtype), table, values)
    return pool, jax.jit(read)(pool, table), jax.jit(attend)(pool, table, queries)


def collectives_of_global_ids(mesh: Mesh, shape: tuple[int, ...], dtype: str) -> list[str]:
    """The same write by ids that count through all ranks' pages, left to the partitioner: what is avoided here."""
    flat = (shape[0] * shape[1], *shape[2:])
    sharding = NamedSharding(mesh, PartitionSpec(DATA_AXIS, None, TENSOR_AXIS))
    pool = jax.ShapeDtypeStruct(flat, dtype, sharding=sharding)
    ids = jax.ShapeDtypeStruct((16,), np.int32, sharding=NamedSharding(mesh, RANK))
    values = jax.ShapeDtypeStruct((16, shape[-1]), np.float32, sharding=NamedSharding(mesh, PartitionSpec(DATA_AXIS)))
    lowered = jax.jit(write_tokens, donate_argnums=0).lower(pool, ids, ids, values)
    return COLLECTIVES.findall(lowered.compile().as_text())


if __name__ == "__main__":
    sizes = ((2, 4), (4, 2), (8, 1))
    print(json.dumps({f"{dp}x{tp} {dtype}": run(dp, tp, dtype) for dp, tp in sizes for dtype in ("float32", "uint16")}))
