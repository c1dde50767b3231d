"""How fast pages travel between device and host, measured: a few pages out, and back to where they were."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import numpy as np

from app.tpu.lent_arrays import LentArrays
from app.tpu.page_carrier import PageCarrier

MOST_BYTES = 64 * 10**6
_ROUNDS = 3  # of which the best counts: the first fault memory in


class CopyRates(NamedTuple):
    """Bytes a second, gather and scatter included."""

    to_host: float
    to_device: float
    num_bytes: int  # that were moved in each round


def measure_copies(pool: LentArrays, carrier: PageCarrier, num_pages: int) -> CopyRates | None:
    """Of a pool of `num_pages` pages that is open and that no step uses meanwhile; its content stays.

    None for pages without bytes. Compiles the programs first.
    """
    if carrier.page_bytes == 0:
        return None
    pages = np.arange(1, 1 + min(num_pages, max(1, MOST_BYTES // carrier.page_bytes)), dtype=np.int32)
    rounds = [_round_trip(pool, carrier, pages) for _ in range(1 + _ROUNDS)][1:]
    num_bytes = pages.size * carrier.page_bytes
    out_s, back_s = (min(times) for times in zip(*rounds, strict=True))
    return CopyRates(num_bytes / out_s, num_bytes / back_s, num_bytes)


def _round_trip(pool: LentArrays, carrier: PageCarrier, pages: np.ndarray) -> tuple[float, float]:
    """Seconds out and back."""
    buffers = pool.take()
    begin = time.perf_counter()
    on_host = jax.block_until_ready(carrier.to_host(carrier.gather(buffers, pages)))
    out = time.perf_counter()
    pool.put(jax.block_until_ready(carrier.scatter(buffers, pages, carrier.to_device(on_host))))
    return out - begin, time.perf_counter() - out
