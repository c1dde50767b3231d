"""What tiers cost control: processor time of the scheduler's thread for a step with rows, with them and without."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from app.bench.control import drain
from app.bench.timed import TimedRuntime
from app.config.server_args import ServerArgs
from app.config.tier_settings import WritePolicy
from app.core.batch import PreparedBatch, StepHandle
from app.core.sampling import SamplingParams
from app.providers.testing import overridden
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.observer import Unobserved
from app.scheduling.request import Request
from app.scheduling.scheduler import Scheduler
from app.tpu.cpu_fake import fake_model_config

DEFAULT: WritePolicy = ServerArgs().hicache_write_policy
ARMS = ("off", "write_through_selective", "write_back", "write_through")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlLoad:
    """Conversations of `turns` requests, each of which says `turn_tokens` more and is answered with `outputs`.

    The pool of the device holds about half of what they say together, that of the host four times as much.
    """

    conversations: int = 24
    turns: int = 4
    turn_tokens: int = 64
    outputs: int = 32
    running: int = 8
    rounds: int = 3


class _CountingRuntime(TimedRuntime):
    """Counts the steps with rows."""

    num_steps = 0

    def execute_batch(self, prepared: PreparedBatch) -> StepHandle:
        self.num_steps += prepared.page_offsets.size > 1
        return super().execute_batch(prepared)


def tier_control_times(load: ControlLoad) -> dict[str, Any]:
    """Microseconds a step of each arm, the least of some rounds taken in turn. The fake model; no garbage left over."""
    rounds = [[_us_a_step(arm, load) for arm in ARMS] for _ in range(load.rounds)]
    least = dict(zip(ARMS, (min(each) for each in zip(*rounds, strict=True)), strict=True))
    ratios = {arm: least[arm] / least["off"] for arm in ARMS[1:]}
    return {"us_a_step": least, "ratios": ratios, "control_ratio": ratios[DEFAULT]}


def _us_a_step(arm: str, load: ControlLoad) -> float:
    longest = load.turns * (load.turn_tokens + load.outputs)
    page_size = 16
    args = ServerArgs(
        page_size=page_size,
        max_running_requests=load.running,
        max_total_tokens=max(load.conversations * longest // 2, load.running * (longest + page_size)),
        context_length=longest + page_size,
    )
    if arm != "off":
        policy = cast(WritePolicy, arm)
        args = replace(args, enable_hierarchical_cache=True, hicache_ratio=8.0, hicache_write_policy=policy)
    with overridden(args, fake=True, model=fake_model_config(context_length=longest + page_size)) as container:
        runtime = _CountingRuntime(container.runtime())
        scheduler = Scheduler(
            adapter=SchedulerAdapter(container.tree_cache(), load.running),
            runtime=runtime,
            finish_rule=container.finish_rule(),
            limits=container.scheduler_limits(),
            observer=Unobserved(),
        )
        said = _conversations(load)
        spent = steps = 0
        for turn in range(load.turns):
            gc.collect()
            runtime.device_clock.reset()
            first, began = runtime.num_steps, time.thread_time_ns()
            for number, tokens in enumerate(said):
                scheduler.add(
                    Request(
                        request_id=f"control-{turn}-{number}",
                        prompt_token_ids=tokens[: (turn + 1) * (load.turn_tokens + load.outputs) - load.outputs],
                        sampling=SamplingParams(max_tokens=load.outputs, ignore_eos=True),
                    )
                )
            drain(scheduler)
            if turn:
                spent += time.thread_time_ns() - began - runtime.device_clock.nanoseconds
                steps += runtime.num_steps - first
            while scheduler.has_background_work():
                scheduler.step()
    return spent / 1e3 / max(steps, 1)


def _conversations(load: ControlLoad) -> list[np.ndarray]:
    """All that is said in each, ids of the fake model."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(1, 250, load.turns * (load.turn_tokens + load.outputs)).astype(np.int32)
        for _ in range(load.conversations)
    ]
