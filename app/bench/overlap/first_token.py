"""Time to the first token of one prefix: computed, and found on the device, on the host, in storage. In turn.

Beside it, in the same rounds, how fast its pages travelled and the bare copies that are the floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import numpy as np

from app.bench.overlap.rig import OverlapRig
from app.caches.tiers.counters import TierCounters
from app.scheduling.request import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLengths:
    """In tokens. suffix: what each request has beyond the prefix."""

    prefix: int = 1000
    suffix: int = 17


def first_token_times(rig: OverlapRig, lengths: PrefixLengths, rounds: int) -> dict[str, Any]:
    """Medians of `rounds` after one that is not counted: programs are compiled in it."""
    rows = [_round(rig, lengths) for _ in range(1 + rounds)][1:]
    middle = {name: median(values) for name in rows[0] if (values := [row[name] for row in rows if name in row])}
    tiers = {name: _over(middle, name, "recompute") for name in ("ttft_l1", "ttft_l2", "ttft_l3")}
    whole = lengths.prefix // rig.page_size * rig.page_size
    return {
        "prefix_tokens": lengths.prefix,
        "ttft_ms": {name.removeprefix("ttft_"): 1e3 * middle[name] for name in (*tiers, "recompute")},
        **{f"{name}_over_recompute": ratio for name, ratio in tiers.items()},
        "hit_share": {tier: middle[f"{tier}_tokens"] / whole if whole else 0.0 for tier in ("l1", "l2", "l3")},
        "copies": copy_figures(middle),
    }


def copy_figures(seconds: Mapping[str, float]) -> dict[str, Any]:
    """Bytes a second of what was timed, and the ratios: time of the bare copy, out and in, over the tier's."""
    num_bytes = seconds.get("num_bytes", 0.0)
    rates = {
        name.removesuffix("_s"): num_bytes / value / 1e9
        for name, value in seconds.items()
        if name.endswith("_s") and value > 0
    }
    moved = [seconds.get("tier_out_s", 0.0), seconds.get("tier_in_s", 0.0)]
    has_moved = all(value > 0 for value in moved)
    return {
        "num_bytes": num_bytes,
        "gb_per_s": rates,
        "transfer_over_device_put": (seconds["put_out_s"] + seconds["put_in_s"]) / sum(moved) if has_moved else None,
        "transfer_over_put_of_pages": (seconds["pages_out_s"] + seconds["pages_in_s"]) / sum(moved)
        if has_moved
        else None,
    }


def _round(rig: OverlapRig, lengths: PrefixLengths) -> dict[str, float]:
    prefix = rig.tokens(lengths.prefix)
    num_pages = lengths.prefix // rig.page_size

    def served() -> RequestOutput:
        return rig.serve(np.concatenate([prefix, rig.tokens(lengths.suffix)]))

    cold = served()
    before = rig.tiers.counters()
    rig.hit(prefix)  # so that it is copied to the host, and from there to storage; nothing else happens meanwhile
    rig.settle()
    backed_up = rig.tiers.counters()
    on_device = served()
    rig.settle()
    rig.empty_device()
    there = rig.tiers.counters()
    on_host = served()
    restored = rig.tiers.counters()
    rig.settle()
    rig.empty_device()
    rig.empty_host()
    stored = served()
    rig.settle()
    rig.empty_device()
    rig.empty_host()
    return {
        "recompute": _seconds(cold),
        "ttft_l1": _seconds(on_device),
        "ttft_l2": _seconds(on_host),
        "ttft_l3": _seconds(stored),
        "l1_tokens": float(on_device.cached_tokens),
        "l2_tokens": float(on_host.restored_tokens.host),
        "l3_tokens": float(stored.restored_tokens.storage),
        "num_bytes": float(num_pages * rig.carrier.page_bytes),
        **_scaled("tier_out_s", before, backed_up, num_pages * rig.carrier.page_bytes),
        **_scaled("tier_in_s", there, restored, num_pages * rig.carrier.page_bytes),
        **bare_copies(rig, num_pages),
    }


def bare_copies(rig: OverlapRig, num_pages: int) -> dict[str, float]:
    """Seconds for the bytes of so many pages: one array put, a list of pages put, and a memcpy."""
    page = rig.carrier.page
    on_host = [each.sharding for each in page]
    on_device = [each.sharding.with_memory_kind("device") for each in page]
    rank = next(iter(on_device[0].device_set))
    host = jax.sharding.SingleDeviceSharding(rank, memory_kind="pinned_host")
    device = jax.sharding.SingleDeviceSharding(rank, memory_kind="device")
    num_bytes = max(num_pages * rig.carrier.page_bytes, 4)
    one = jax.device_put(np.zeros(num_bytes // 4, np.float32), device)
    zeros = [tuple(np.zeros(each.shape, each.dtype) for each in page) for _ in range(num_pages)]
    pages = jax.block_until_ready(jax.device_put(zeros, [tuple(on_device)] * num_pages))
    source, target = np.ones(num_bytes, np.uint8), np.full(num_bytes, 2, np.uint8)
    one_out, put_out = _timed(lambda: jax.device_put(one, host))
    _, put_in = _timed(lambda: jax.device_put(one_out, device))
    pages_out, pages_out_s = _timed(lambda: jax.device_put(pages, [tuple(on_host)] * num_pages))
    _, pages_in_s = _timed(lambda: jax.device_put(pages_out, [tuple(on_device)] * num_pages))
    _, memcpy = _timed(lambda: np.copyto(target, source))
    return {
        "put_out_s": put_out,
        "put_in_s": put_in,
        "pages_out_s": pages_out_s,
        "pages_in_s": pages_in_s,
        "memcpy_s": memcpy,
    }


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = jax.block_until_ready(call())
    return result, time.perf_counter() - began


def _seconds(output: RequestOutput) -> float:
    assert output.first_token_ns is not None, output.error
    return output.first_token_ns / 1e9


def _scaled(name: str, before: TierCounters, after: TierCounters, num_bytes: int) -> dict[str, float]:
    """Seconds that `num_bytes` took by what was counted in between; nothing if nothing moved."""
    if name == "tier_out_s":
        moved, seconds = after.backed_up_bytes - before.backed_up_bytes, after.backup_s - before.backup_s
    else:
        moved, seconds = after.restored_bytes - before.restored_bytes, after.restore_s - before.restore_s
    return {name: seconds * num_bytes / moved} if moved else {}


def _over(values: Mapping[str, float], name: str, other: str) -> float:
    return values[name] / values[other]
