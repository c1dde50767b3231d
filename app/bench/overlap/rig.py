"""A whole engine with tiers, run by the calling thread, and what is done to it: serve, settle, empty."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from dependency_injector import providers

from app.bench.overlap.recording import RecordedCopies, RecordedLane, RecordedRuntime, Recorder
from app.caches.base import BasePrefixCache
from app.caches.tiers.tiers import Tiers
from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.containers import Container
from app.core.keys import RadixKey
from app.core.sampling import SamplingParams
from app.core.transfers import OfEachPool
from app.providers.testing import overridden
from app.providers.tiers import mover
from app.providers.warmup import warm_up
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.observer import Unobserved
from app.scheduling.request import Request, RequestOutput
from app.scheduling.scheduler import Scheduler
from app.tpu.page_carrier import PageCarrier
from app.tpu.tier_copies import DeviceCopies, TierCopies

SETTLE_S = 60.0
MakeCopies = Callable[[OfEachPool[PageCarrier | None]], TierCopies]


class OverlapRig:
    """Single-threaded. Prompts are random and never repeat by themselves."""

    def __init__(self, container: Container, recorder: Recorder) -> None:
        args = container.server_args()
        self.recorder = recorder
        self.cache: BasePrefixCache = container.tree_cache()
        tiers = self.cache.tiers
        assert isinstance(tiers, Tiers)
        self.tiers = tiers
        carrier = container.page_carriers().pages
        assert carrier is not None  # every pool has full pages
        self.carrier: PageCarrier = carrier
        self.scheduler = Scheduler(
            adapter=SchedulerAdapter(self.cache, args.max_running_requests),
            runtime=RecordedRuntime(container.runtime(), recorder),
            finish_rule=container.finish_rule(),
            limits=container.scheduler_limits(),
            observer=Unobserved(),
        )
        self.page_size = args.page_size
        self._vocab_size = min(container.model_config().vocab_size, 30_000)
        self._rng = np.random.default_rng(0)
        self._ids = itertools.count()

    def tokens(self, count: int) -> np.ndarray:
        """(count,) int32, new ones each time."""
        return self._rng.integers(0, self._vocab_size, count).astype(np.int32)

    def add(self, prompt: np.ndarray, outputs: int) -> None:
        sampling = SamplingParams(max_tokens=outputs, ignore_eos=True)
        self.scheduler.add(Request(request_id=f"overlap-{next(self._ids)}", prompt_token_ids=prompt, sampling=sampling))

    def serve(self, prompt: np.ndarray, outputs: int = 1) -> RequestOutput:
        """Alone, from its arrival to its end."""
        self.add(prompt, outputs)
        ended: list[RequestOutput] = []
        while self.scheduler.has_work():
            ended += self.scheduler.step()
        (output,) = ended
        return output

    def settle(self) -> None:
        """Until nothing moves. TimeoutError if that takes too long."""
        began = time.monotonic()
        while self.scheduler.has_background_work():
            self.scheduler.step()
            if time.monotonic() - began > SETTLE_S:
                raise TimeoutError(f"tiers were still moving pages after {SETTLE_S} s")

    def finish(self) -> None:
        while self.scheduler.has_work():
            self.scheduler.step()
        self.settle()

    def empty_device(self) -> None:
        """What no request reads goes from the device, and what that moves down has arrived."""
        self.cache.evict(self.cache.evictable_pages)
        self.settle()

    def empty_host(self) -> None:
        self.tiers.flush()

    def hit(self, prefix: np.ndarray) -> None:
        """As another request with that prefix would: with the policy of this rig it is then copied to the host."""
        self.cache.match(RadixKey.of(np.append(prefix, np.int32(0))))


@contextmanager
def overlap_rig(
    args: ServerArgs,
    storage: Path,
    *,
    fake: bool = False,
    model: ModelConfig | None = None,
    copies: MakeCopies = DeviceCopies,
) -> Iterator[OverlapRig]:
    """Every prefix is copied to the host at its first hit, and from there to files in `storage`."""
    sized = replace(
        args,
        enable_hierarchical_cache=True,
        hicache_write_policy="write_through_selective",
        hicache_write_min_hits=1,
        hicache_storage_backend="file",
        hicache_storage_path=str(storage),
        hicache_storage_prefetch_policy="wait_complete",
    )
    recorder = Recorder()

    def recorded_mover(container: Container) -> providers.Provider[object]:
        return providers.ThreadSafeSingleton(
            mover,
            container.host_size,
            container.host_pool,
            container.page_carriers.provider,
            container.device_pool,
            providers.ThreadSafeSingleton(RecordedLane, container.storage_lane, recorder),
            container.storage,
            copies=providers.Object(lambda carriers: RecordedCopies(copies(carriers), recorder)),
        )

    try:
        with overridden(sized, fake=fake, model=model, tier_mover=recorded_mover) as container:
            rig = OverlapRig(container, recorder)
            list(warm_up(container.runtime(), "copies", container.scheduler_limits(), rig.tiers))
            yield rig
    finally:
        recorder.close()
