"""Pools of every kind with a pattern of its own in every element, to see where pages went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from app.config.model_config import StateArray
from app.core.ports import PoolSpec, StateSpec
from app.core.transfers import OfEachPool, PageIds
from app.tpu.hybrid_fake import FakeHybridPool
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.hybrid_pool import HybridKVPool
from app.tpu.kv_pool import MHATokenToKVPool
from app.tpu.page_carriers import ArraysCarrier, hybrid_page_carriers, page_carriers
from app.tpu.pool_layout import ArrayPerLayer, FlatByHead, FlatWide, PoolLayout

NUM_PAGES, NUM_WINDOW_PAGES, NUM_SNAPSHOTS, NUM_ROWS = 13, 11, 12, 3
LAYOUTS: dict[str, PoolLayout] = {"per layer": ArrayPerLayer(), "wide": FlatWide(), "by head": FlatByHead()}
STATES = (StateArray(shape=(4, 3, 2), sharded_axis=0), StateArray(shape=(8, 3), sharded_axis=0), StateArray(shape=(5,)))
HYBRIDS = ("window", "recurrent", "everything", "latent", "no full layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedPool:
    pool: MHATokenToKVPool | HybridKVPool
    carriers: OfEachPool[ArraysCarrier | None]

    def arrays(self) -> list[np.ndarray]:
        """Copies of all that the device holds."""
        buffers = self.pool.take()
        self.pool.put(buffers)
        return [np.array(array) for array in jax.tree.leaves(buffers)]

    def pointers(self) -> list[int]:
        buffers = self.pool.take()
        self.pool.put(buffers)
        return [
            shard.data.unsafe_buffer_pointer()
            for array in jax.tree.leaves(buffers)
            for shard in array.addressable_shards
        ]

    def fill(self, seed: int) -> None:
        """Every array of the pool with patterns that are nowhere else: pages of padding and running states too."""
        rng = np.random.default_rng(seed)

        def filled(array: jax.Array) -> jax.Array:
            # A copy: what jax was lent by numpy it cannot write in place.
            return jnp.copy(jax.device_put(bits(rng, array), array.sharding))

        self.pool.put(jax.tree.map(filled, self.pool.take()))


def bits(rng: np.random.Generator, array: Any) -> np.ndarray:
    """Random finite numbers, in which all bits but the highest of an exponent vary."""
    width = np.uint16 if array.dtype.itemsize == 2 else np.uint32
    drawn = rng.integers(0, np.iinfo(width).max, array.shape, width, endpoint=True)
    return (drawn & ~width(1 << (8 * width().itemsize - 2))).view(array.dtype)


def flat_pool(layout: PoolLayout, mesh: Mesh, *, page_size: int, dtype: str, num_layers: int = 3) -> PagedPool:
    spec = PoolSpec(
        num_pages=NUM_PAGES,
        page_size=page_size,
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=3,
        dtype=dtype,
        extra_kv_heads=2,
        extra_head_dim=1,
    )
    pool = MHATokenToKVPool(spec, mesh, layout)
    pool.open()
    return PagedPool(pool=pool, carriers=page_carriers(spec, mesh, layout))


def hybrid_pool(kind: str, mesh: Mesh, *, page_size: int, dtype: str) -> PagedPool:
    full = PoolSpec(num_pages=NUM_PAGES, page_size=page_size, num_layers=2, num_kv_heads=2, head_dim=4, dtype=dtype)
    window = PoolSpec(
        num_pages=NUM_WINDOW_PAGES, page_size=page_size, num_layers=3, num_kv_heads=4, head_dim=2, dtype=dtype
    )
    latent = PoolSpec(
        num_pages=NUM_PAGES,
        page_size=page_size,
        num_layers=2,
        num_kv_heads=1,
        head_dim=10,
        dtype=dtype,
        arrays_per_layer=1,
    )
    states = StateSpec(num_snapshots=NUM_SNAPSHOTS, num_rows=NUM_ROWS, num_layers=2, arrays=STATES)
    spec = {
        "window": HybridSpec(full=full, window=window),
        "recurrent": HybridSpec(full=full, states=states),
        "everything": HybridSpec(full=full, window=window, states=states),
        "latent": HybridSpec(full=latent),
        "no full layer": HybridSpec(states=states),
    }[kind]
    pool = FakeHybridPool(full, spec, mesh)
    pool.open()
    return PagedPool(pool=pool, carriers=hybrid_page_carriers(spec, mesh, full.num_pages))


def kinds_of(carriers: OfEachPool[ArraysCarrier | None]) -> list[tuple[int, ArraysCarrier]]:
    """The kinds that there are, and their places in PageIds."""
    return [(place, carrier) for place, carrier in enumerate(carriers) if carrier is not None]


def some_ids(carriers: OfEachPool[ArraysCarrier | None], seed: int, num_pages: int) -> PageIds:
    """Distinct ids of each kind that there is, in no order."""
    rng = np.random.default_rng(seed)
    last = (NUM_PAGES, NUM_WINDOW_PAGES, NUM_SNAPSHOTS)
    return PageIds(
        *(
            np.empty(0, np.int32) if carrier is None else rng.permutation(last[place])[:num_pages].astype(np.int32) + 1
            for place, carrier in enumerate(carriers)
        )
    )
