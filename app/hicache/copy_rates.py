"""How fast pages travel between device and host, measured: a few pages out, and back to where they were."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import numpy as np

from app.core.transfers import OfEachPool
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
    round_trip(pool, carrier, pages)
    rounds = [round_trip(pool, carrier, pages) for _ in range(_ROUNDS)]
    num_bytes = pages.size * carrier.page_bytes
    out_s, back_s = (min(times) for times in zip(*rounds, strict=True))
    return CopyRates(num_bytes / out_s, num_bytes / back_s, num_bytes)


def round_trip(pool: LentArrays, carrier: PageCarrier, pages: np.ndarray) -> tuple[float, float]:
    """Out and back, one page of the pool each, as `gather` takes them. -> seconds of both. The content stays."""
    buffers = pool.take()
    begin = time.perf_counter()
    on_host = jax.block_until_ready(carrier.to_host(carrier.gather(buffers, pages)))
    out = time.perf_counter()
    pool.put(jax.block_until_ready(carrier.scatter(buffers, pages, carrier.to_device(on_host))))
    return out - begin, time.perf_counter() - out


class CopyWarmUp:
    """Runs every program that moves pages, before there are transfers, on pages that stay as they are."""

    def __init__(self, carriers: OfEachPool[PageCarrier | None], pool: LentArrays) -> None:
        self._pool = pool
        self._groups = [
            (carrier, pages)
            for carrier in carriers
            if carrier is not None and carrier.page_bytes
            for pages in carrier.groups()
        ]
        self._restored_bytes = 0
        self._restored_s = 0.0

    @property
    def num_steps(self) -> int:
        return len(self._groups)

    @property
    def restored_bytes_per_s(self) -> float | None:
        """Of what was run so far, compiling left out. None before that."""
        return self._restored_bytes / self._restored_s if self._restored_s > 0 else None

    def run(self, step: int) -> None:
        """Compile what moves one group of pages, and measure it. Raises what the device raises: the pool is lost."""
        carrier, pages = self._groups[step]
        round_trip(self._pool, carrier, pages)
        _, back_s = round_trip(self._pool, carrier, pages)
        self._restored_bytes += pages.size * carrier.page_bytes
        self._restored_s += back_s
