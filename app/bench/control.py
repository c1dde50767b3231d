"""What control costs, without a model: processor time of the scheduler's thread, garbage collection on.

A decode step by batch size, split into scheduling, tree and prepare; and requests that share nothing, where a cache can
only cost: the tree against the cache that keeps nothing, for a model with sliding windows.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import numpy as np

from app.bench.timed import TimedCache, TimedRuntime
from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.containers import Container
from app.core.sampling import SamplingParams
from app.providers.testing import overridden
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.observer import Unobserved
from app.scheduling.request import Request
from app.scheduling.scheduler import Scheduler
from app.tpu.cpu_fake import fake_model_config

CONTROL_BATCHES = (1, 16, 64, 256)
CONTROL_STEPS = 200
CONTROL_ROUNDS = 3
NO_REUSE_REQUESTS = 48
NO_REUSE_SHAPES = ((250, 128), (600, 32), (2000, 32))  # tokens of a prompt and of its answer
NO_REUSE_WINDOW = 128
NO_REUSE_ROUNDS = 5
NO_REUSE_CACHES = ("unified_radix_cache", "chunk_cache")


@contextmanager
def _timed_engine(
    args: ServerArgs, model: ModelConfig
) -> Iterator[tuple[Container, Scheduler, TimedCache, TimedRuntime]]:
    with overridden(args, fake=True, model=model) as container:
        cache, runtime = TimedCache(container.tree_cache()), TimedRuntime(container.runtime())
        scheduler = Scheduler(
            adapter=SchedulerAdapter(cache, args.max_running_requests),
            runtime=runtime,
            finish_rule=container.finish_rule(),
            limits=container.scheduler_limits(),
            observer=Unobserved(),
        )
        yield container, scheduler, cache, runtime


def control_times() -> list[dict[str, Any]]:
    """For each batch size the quietest of some rounds, taken in turn: other users of the machine only ever add."""
    rounds = [[_control_time(batch) for batch in CONTROL_BATCHES] for _ in range(CONTROL_ROUNDS)]
    return [min(rows, key=lambda row: row["control_us"]) for rows in zip(*rounds, strict=True)]


def _control_time(running: int) -> dict[str, Any]:
    """Processor microseconds of the control thread for one decode step of `running` requests; garbage collection on."""
    outputs = CONTROL_STEPS + 20
    args = ServerArgs(
        max_running_requests=running,
        max_total_tokens=max(1024, running * (16 + outputs + 32)),
        context_length=512,
        chunked_prefill_size=8192,
    )
    with _timed_engine(args, fake_model_config(context_length=512)) as (container, scheduler, cache, runtime):
        fill(scheduler, container, running, outputs=outputs, context=16)
        while scheduler.num_waiting:
            scheduler.step()
        for _ in range(8):
            scheduler.step()
        gc.collect()
        samples = [_one_control_step(scheduler, cache, runtime) for _ in range(CONTROL_STEPS)]
        drain(scheduler)
    columns = [median(column) for column in zip(*samples, strict=True)]
    names = ("control_us", "scheduler_us", "tree_us", "prepare_us")
    return {"running": running, **dict(zip(names, columns, strict=True))}


def _one_control_step(scheduler: Scheduler, cache: TimedCache, runtime: TimedRuntime) -> tuple[float, ...]:
    cache.clock.reset()
    runtime.prepare_clock.reset()
    runtime.device_clock.reset()
    began = time.thread_time_ns()
    scheduler.step()
    total = time.thread_time_ns() - began - runtime.device_clock.nanoseconds
    tree, prepare = cache.clock.nanoseconds, runtime.prepare_clock.nanoseconds
    return total / 1e3, (total - tree - prepare) / 1e3, tree / 1e3, prepare / 1e3


def no_reuse_times() -> list[dict[str, Any]]:
    """For each shape, processor microseconds of control for a request, by cache.

    Of some rounds taken in turn the least; their ratio is the median of those of the rounds.
    """
    return [_no_reuse_times(*shape) for shape in NO_REUSE_SHAPES]


def _no_reuse_times(prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    rounds = [
        [_no_reuse_time(name, prompt_tokens, output_tokens) for name in NO_REUSE_CACHES] for _ in range(NO_REUSE_ROUNDS)
    ]
    return {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "us_a_request": dict(zip(NO_REUSE_CACHES, map(min, zip(*rounds, strict=True)), strict=True)),
        "ratio": median(tree / none for tree, none in rounds),
    }


def _no_reuse_time(cache_type: str, prompt_tokens: int, output_tokens: int) -> float:
    """The first third of the requests fills the pool and is not counted."""
    num_tokens = prompt_tokens + output_tokens
    args = ServerArgs(
        cache_type=cache_type,
        max_running_requests=8,
        max_total_tokens=12 * num_tokens,
        context_length=num_tokens + 64,
    )
    model = fake_model_config(context_length=num_tokens + 64, window=NO_REUSE_WINDOW)
    with _timed_engine(args, model) as (container, scheduler, _, runtime):
        spent = 0
        for begin in range(0, NO_REUSE_REQUESTS, NO_REUSE_REQUESTS // 3):
            runtime.device_clock.reset()
            gc.collect()
            began = time.thread_time_ns()
            for number in range(begin, begin + NO_REUSE_REQUESTS // 3):
                name = f"no-reuse-{number}"
                scheduler.add(request_of(container, name, prompt_tokens, outputs=output_tokens))
            drain(scheduler)
            if begin:
                spent += time.thread_time_ns() - began - runtime.device_clock.nanoseconds
    return spent / 1e3 / (NO_REUSE_REQUESTS * 2 // 3)


def fill(scheduler: Scheduler, container: Container, count: int, *, outputs: int, context: int) -> None:
    for number in range(count):
        scheduler.add(request_of(container, f"bench-{number}", context, outputs=outputs))
    while scheduler.num_waiting:
        scheduler.step()


def request_of(container: Container, name: str, num_tokens: int, *, outputs: int) -> Request:
    rng = np.random.default_rng(len(name) * 1000 + hash(name) % 1000)
    tokens = rng.integers(0, min(250, container.model_config().vocab_size), num_tokens).astype(np.int32)
    return Request(
        request_id=name, prompt_token_ids=tokens, sampling=SamplingParams(max_tokens=outputs, ignore_eos=True)
    )


def drain(scheduler: Scheduler) -> None:
    while scheduler.has_work():
        scheduler.step()
