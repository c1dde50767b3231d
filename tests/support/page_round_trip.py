"""Moves pages of every kind out of a pool and back to other places, and says what the pool must hold then.

Run as a program in a process of its own with 8 CPU devices: every kind of pool over several ranks. Prints JSON.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from app.core.transfers import PageIds
from app.tpu.mesh import make_mesh
from app.tpu.page_carrier import PoolContents
from app.tpu.page_carriers import gather_each, scatter_each
from app.tpu.tier_copies import DeviceCopies
from tests.support.page_cases import LAYOUTS, PagedPool, flat_pool, hybrid_pool, some_ids

SHARED_KINDS = ("everything", "latent")


def backed_up(paged: PagedPool, ids: PageIds) -> PoolContents:
    """The content of these pages, in pinned host memory."""
    buffers = paged.pool.take()
    paged.pool.put(buffers)
    return DeviceCopies(paged.carriers).to_host(gather_each(paged.carriers, buffers, ids)).result()


def restore(paged: PagedPool, ids: PageIds, contents: PoolContents) -> None:
    on_device = DeviceCopies(paged.carriers).to_device(contents).result()
    paged.pool.put(scatter_each(paged.carriers, paged.pool.take(), ids, on_device))


def through_bytes(paged: PagedPool, contents: PoolContents) -> PoolContents:
    """As if storage had kept them."""
    return type(contents)(
        *(
            [] if carrier is None else [carrier.from_bytes(carrier.to_bytes(page).copy()) for page in pages]
            for carrier, pages in zip(paged.carriers, contents, strict=True)
        )
    )


def differences(paged: PagedPool, num_pages: int) -> list[str]:
    """Out, everything overwritten, by way of bytes back into other pages. -> what is not as it must be."""
    paged.fill(seed=1)
    before = by_page(paged)
    sources, targets = some_ids(paged.carriers, 2, num_pages), some_ids(paged.carriers, 3, num_pages)
    contents = backed_up(paged, sources)
    paged.fill(seed=4)
    wanted, pointers = by_page(paged), paged.pointers()

    restore(paged, targets, through_bytes(paged, contents))

    for kind, arrays in enumerate(wanted):
        for old, new in zip(before[kind], arrays, strict=True):
            new[targets[kind]] = old[sources[kind]]
    found = by_page(paged)
    broken = [
        f"kind {kind}: array {place}"
        for kind, arrays in enumerate(wanted)
        for place, array in enumerate(arrays)
        if array.tobytes() != found[kind][place].tobytes()
    ]
    return broken + ([] if paged.pointers() == pointers else ["the pool is not where it was"])


def by_page(paged: PagedPool) -> list[list[np.ndarray]]:
    """Copies of the pool's arrays of each kind, with the axis of pages in front."""
    buffers = paged.pool.take()
    paged.pool.put(buffers)
    kinds: list[Any] = (
        [buffers.full, buffers.window, buffers.states] if "full" in buffers._fields else [buffers, (), ()]
    )
    arrays = [[np.array(array) for array in jax.tree.leaves(kind)] for kind in kinds]
    if "pages" in buffers._fields:  # flat: layer by layer
        (pool,) = arrays[0]
        arrays[0] = [pool.reshape(paged.pool.spec.num_layers, -1, *pool.shape[1:]).swapaxes(0, 1).copy()]
    return arrays


def main() -> dict[str, list[str]]:
    told = {}
    for dtype in ("float32", "bfloat16_bits"):
        for tp_size in (2, 4):
            mesh = make_mesh(tp_size, "cpu")
            for name, layout in LAYOUTS.items():
                told[f"{name} {tp_size} {dtype}"] = differences(flat_pool(layout, mesh, page_size=4, dtype=dtype), 9)
        for kind in SHARED_KINDS:
            paged = hybrid_pool(kind, make_mesh(2, "cpu"), page_size=4, dtype=dtype)
            told[f"{kind} 2 {dtype}"] = differences(paged, 9)
    return told


if __name__ == "__main__":
    print(json.dumps(main()))
