"""Copies beside running decodes: how much of a restore's time lies behind steps, and what backups cost a token."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.bench.overlap.plain_copies import PlainCopies
from app.bench.overlap.recording import Event, hidden_share, idle_share
from app.bench.overlap.rig import OverlapRig

_ARMS = ("none", "backups", "floor")
_WARM_UP_STEPS = 2  # of a window, which may see what the one before began


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLoad:
    """rows decode all the while, from contexts of `context` tokens. prefixes, of prefix_tokens each: what moves.

    windows, of window_steps each, at least three: without backups, with them, with copies of a plain thread, in turn.
    """

    rows: int = 4
    context: int = 32
    prefixes: int = 6
    prefix_tokens: int = 512
    windows: int = 24
    window_steps: int = 16


def restores_beside_decodes(rig: OverlapRig, load: DecodeLoad) -> tuple[dict[str, Any], list[Event]]:
    """Requests with a prefix on the host arrive one after another while others decode. -> figures, what happened."""
    prefixes = _prefixes_on_device(rig, load)
    _start_decoding(rig, load, outputs=load.prefixes * 24 + 16)
    drawn_from = time.monotonic()  # the picture shows how they got to the host as well
    for prefix in prefixes:
        rig.hit(prefix)
    _until_settled(rig)
    rig.cache.evict(rig.cache.evictable_pages)
    _until_settled(rig)
    restored = rig.tiers.counters().restored_tokens
    began, cpu = time.monotonic(), time.thread_time()
    for prefix in prefixes:
        rig.add(np.concatenate([prefix, rig.tokens(3)]), 1)
        for _ in range(4):
            rig.scheduler.step()
        while rig.scheduler.num_waiting:
            rig.scheduler.step()
    cpu_share = (time.thread_time() - cpu) / (time.monotonic() - began)
    rig.finish()
    events = rig.recorder.since(began)
    steps = [event for event in events if event.lane == "compute"]
    expected = load.prefixes * (load.prefix_tokens // rig.page_size) * rig.page_size
    moved = rig.tiers.counters().restored_tokens - restored
    figures = {
        "restore_hidden_share": hidden_share((event for event in events if event.lane == "to device"), steps),
        "restored_share": moved / expected,
        "scheduler_cpu_share": cpu_share,
        "idle_share": idle_share(steps),
    }
    return figures, rig.recorder.since(drawn_from)


def backups_beside_decodes(rig: OverlapRig, load: DecodeLoad) -> dict[str, Any]:
    """Inter-token times of the same rows, in windows in turn: with nothing else, while prefixes are copied out, and
    while a plain thread copies as many bytes, which is the floor.
    """
    prefixes = _prefixes_on_device(rig, load)
    total = load.windows * (load.window_steps + _WARM_UP_STEPS)
    _start_decoding(rig, load, outputs=3 * total + 64)
    times: dict[str, list[list[float]]] = {arm: [] for arm in _ARMS}  # by window
    num_bytes = num_steps = 0
    plain = PlainCopies(rig.carrier.page_bytes)
    for window in range(load.windows):
        arm = _ARMS[window % len(_ARMS)]
        times[arm].append([])
        before = rig.tiers.counters().backed_up_bytes
        for step in range(_WARM_UP_STEPS + load.window_steps):
            if arm == "backups":
                rig.hit(prefixes[step % len(prefixes)])
                if step % len(prefixes) == len(prefixes) - 1:
                    rig.empty_host()  # all of it is to be copied again
            began = time.perf_counter()
            if arm == "floor":
                plain.begin(num_bytes // max(num_steps, 1))
            rig.scheduler.step()
            if step >= _WARM_UP_STEPS:
                times[arm][-1].append(time.perf_counter() - began)
        num_bytes += rig.tiers.counters().backed_up_bytes - before
        num_steps += _WARM_UP_STEPS + load.window_steps if arm == "backups" else 0
        _until_settled(rig)
    plain.close()
    rig.finish()
    rig.empty_device()
    rig.empty_host()
    every = {arm: [seconds for each in times[arm] for seconds in each] for arm in _ARMS}
    p50, p99 = ({arm: 1e3 * float(np.percentile(every[arm], q)) for arm in _ARMS} for q in (50, 99))
    return {
        "itl_ratio_p50": _median_ratio(times["backups"], times["none"]),
        "itl_ratio_p99": p99["backups"] / p99["none"],
        "itl_floor_p50": _median_ratio(times["floor"], times["none"]),
        "itl_floor_p99": p99["floor"] / p99["none"],
        "itl_ms": {
            "with_p50": p50["backups"],
            "without_p50": p50["none"],
            "with_p99": p99["backups"],
            "without_p99": p99["none"],
        },
        "backed_up_mb_per_s": num_bytes / 1e6 / sum(every["backups"]),
    }


def _median_ratio(windows: list[list[float]], others: list[list[float]]) -> float:
    """Of the medians of windows that followed one another: the machine is not as quick from one minute to the next."""
    return float(np.median([np.median(one) / np.median(other) for one, other in zip(windows, others, strict=False)]))


def _prefixes_on_device(rig: OverlapRig, load: DecodeLoad) -> list[np.ndarray]:
    prefixes = [rig.tokens(load.prefix_tokens) for _ in range(load.prefixes)]
    for prefix in prefixes:
        rig.serve(np.concatenate([prefix, rig.tokens(3)]))
    rig.settle()
    return prefixes


def _start_decoding(rig: OverlapRig, load: DecodeLoad, outputs: int) -> None:
    for _ in range(load.rows):
        rig.add(rig.tokens(load.context), outputs)
    while rig.scheduler.num_waiting:
        rig.scheduler.step()
    for _ in range(4):
        rig.scheduler.step()


def _until_settled(rig: OverlapRig) -> None:
    """While rows go on decoding."""
    while rig.scheduler.has_background_work() and rig.scheduler.has_work():
        rig.scheduler.step()
