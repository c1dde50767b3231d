"""What the engine costs beside the model: step times against the bare compiled step, and control time per step.

With the real model: a decode step through the scheduler against the same compiled programs called in a bare loop (the
floor, measured in the same run), in a small pool and a large one, and prefill speed. With the fake model: see
app/bench/control.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from app.bench.control import CONTROL_ROUNDS, control_times, drain, fill, no_reuse_times, request_of
from app.config.server_args import ServerArgs
from app.containers import Container, build_container
from app.core.ports import DecodeInputs
from app.models.sampler import SamplingVariant, greedy_rows, sample

DECODE_BATCHES = (1, 4, 16)
CONTEXT_TOKENS = 200  # and what a run adds stays within one page-table bucket
POOL_PAGES = (64, 1600)
PREFILL_TOKENS = 512
STEPS = 12


def run_engine_bench(server_args: ServerArgs) -> dict[str, Any]:
    """-> figures by name; times in milliseconds or microseconds as the names say. Takes some minutes."""
    return {
        "decode": [_decode_step(server_args, batch) for batch in DECODE_BATCHES],
        "pool_size": _pool_size_ratio(server_args),
        "prefill": _prefill(server_args),
        "control": control_times(),
        "no_reuse": no_reuse_times(),
    }


def format_engine_bench(result: dict[str, Any]) -> str:
    lines = ["decode step, real model (floor: the same compiled programs in a bare loop)"]
    lines += [
        f"  batch {row['batch']:>3}: {row['step_ms']:8.1f} ms   bare {row['bare_ms']:8.1f} ms   "
        f"ratio {row['step_over_bare']:.2f}"
        for row in result["decode"]
    ]
    pools = result["pool_size"]
    lines.append(
        f"pool of {POOL_PAGES[1]} pages against {POOL_PAGES[0]}: bare step {pools['large_ms']:.1f} / "
        f"{pools['small_ms']:.1f} ms, ratio {pools['large_over_small']:.2f}"
    )
    prefill = result["prefill"]
    lines.append(f"prefill of {PREFILL_TOKENS} tokens: {prefill['tokens_per_second']:.0f} tokens/s")
    lines.append(
        "control time a decode step, fake model: processor time of the scheduler's thread, "
        f"least of {CONTROL_ROUNDS} medians"
    )
    lines += [
        f"  {row['running']:>3} running: {row['control_us']:7.1f} us   "
        f"(scheduler {row['scheduler_us']:.1f}, tree {row['tree_us']:.1f}, prepare {row['prepare_us']:.1f})"
        for row in result["control"]
    ]
    lines.append("control time of requests that share nothing, model with sliding windows, fake model")
    lines += [
        f"  {row['prompt_tokens']:>5} + {row['output_tokens']:<4}tokens: "
        + ", ".join(f"{name} {us:,.0f} us a request" for name, us in row["us_a_request"].items())
        + f"   ratio {row['ratio']:.2f}"
        for row in result["no_reuse"]
    ]
    return "\n".join(lines)


def _decode_step(args: ServerArgs, batch: int) -> dict[str, Any]:
    """Steady decoding of `batch` requests through the scheduler, and bare, interleaved in one process."""
    tokens = batch * (CONTEXT_TOKENS + 2 * STEPS + 2 * args.page_size)
    sized = replace(args, max_total_tokens=max(tokens, 2048), context_length=1024, max_running_requests=max(batch, 2))
    container = build_container(sized)
    try:
        scheduler = container.scheduler()
        fill(scheduler, container, batch, outputs=2 * STEPS + 4, context=CONTEXT_TOKENS)
        for _ in range(4):
            scheduler.step()
        step_ms = _milliseconds(scheduler.step, STEPS)
        drain(scheduler)
        bare_ms = _milliseconds(_bare_step(container, batch), STEPS)
    finally:
        container.shutdown_resources()
    return {"batch": batch, "step_ms": step_ms, "bare_ms": bare_ms, "step_over_bare": step_ms / bare_ms}


def _pool_size_ratio(args: ServerArgs) -> dict[str, float]:
    times = []
    for pages in POOL_PAGES:
        container = build_container(
            replace(args, max_total_tokens=pages * args.page_size, context_length=512, max_running_requests=2)
        )
        try:
            container.runtime()
            times.append(_milliseconds(_bare_step(container, 2), STEPS))
        finally:
            container.shutdown_resources()
    return {"small_ms": times[0], "large_ms": times[1], "large_over_small": times[1] / times[0]}


def _bare_step(container: Container, batch: int) -> Callable[[], None]:
    """One decode step of the compiled programs, read to the host, without runtime, scheduler or tree."""
    runner, pool, page_size = container.model_runner(), container.device_pool(), container.page_size()
    rows = max(2, batch)
    width = max(1 << (-(-CONTEXT_TOKENS // page_size) - 1).bit_length(), -(-128 // page_size))
    used = -(-CONTEXT_TOKENS // page_size)
    table = np.zeros((rows, width), np.int32)
    for row in range(batch):
        table[row, :used] = 1 + (np.arange(used) + row * used) % pool.spec.num_pages
    lengths = np.zeros(rows, np.int32)
    lengths[:batch] = CONTEXT_TOKENS
    inputs = DecodeInputs(
        token_ids=jax.device_put(np.ones(rows, np.int32)),
        lengths=jax.device_put(lengths),
        page_table=jax.device_put(table),
    )
    sampling = greedy_rows(rows)

    def step() -> None:
        buffers, logits = runner.decode(pool.take(), inputs)
        pool.put(buffers)
        np.asarray(sample(logits, sampling, None, variant=SamplingVariant()).token_ids)

    return step


def _prefill(args: ServerArgs) -> dict[str, float]:
    sized = replace(
        args,
        cache_type="chunk_cache",
        max_total_tokens=4 * PREFILL_TOKENS,
        context_length=2 * PREFILL_TOKENS,
        chunked_prefill_size=PREFILL_TOKENS,
        max_running_requests=2,
    )
    container = build_container(sized)
    try:
        scheduler = container.scheduler()
        times = []
        for number in range(4):
            scheduler.add(request_of(container, f"prefill-{number}", PREFILL_TOKENS, outputs=1))
            began = time.perf_counter()
            drain(scheduler)
            times.append(time.perf_counter() - began)
    finally:
        container.shutdown_resources()
    return {"tokens_per_second": PREFILL_TOKENS / min(times[1:])}


def _milliseconds(call: Callable[[], object], count: int) -> float:
    """The least of `count` calls after two that are not counted: noise only ever adds."""
    times = []
    for _ in range(count + 2):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times[2:])
