"""What the scheduler tells is turned into deltas for clients, metrics, and the journal of the cache."""

from __future__ import annotations

import time
from dataclasses import dataclass

from app.caches.base import BasePrefixCache
from app.core.keys import DEFAULT_NAMESPACE
from app.observability.cache_journal import CacheJournal
from app.observability.metrics import Metrics
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.observer import StepTimes
from app.scheduling.request import Request, RequestDelta, RequestOutput, Sequence
from app.scheduling.scheduler import Scheduler
from app.server.restore_watch import RestoreWatch


@dataclass(slots=True)
class _Timeline:
    """ns. added: when the scheduler got the request; last: when the latest token of a streamed one was told."""

    submitted: int
    added: int
    last: int | None = None


class EngineWatch:
    """`SchedulerObserver` of a server. On the engine's thread; the plain numbers may be read from any.

    num_tokens: output tokens since the start. num_running, num_waiting: as of the last step.
    """

    def __init__(self, *, cache: BasePrefixCache, metrics: Metrics, journal: CacheJournal) -> None:
        self._cache = cache
        self._metrics = metrics
        self._journal = journal
        self._timelines: dict[str, _Timeline] = {}
        self._deltas: list[RequestDelta] = []
        self._admitted: list[str] = []
        self._restores = RestoreWatch(cache.tiers.counters)
        self.num_tokens = 0
        self.num_running = 0
        self.num_waiting = 0

    def added(self, request: Request, submitted_ns: int) -> None:
        """The scheduler is about to be given the request."""
        self._timelines[request.request_id] = _Timeline(submitted_ns, time.monotonic_ns())

    def refused(self, request: Request) -> None:
        """The scheduler did not take it after all."""
        del self._timelines[request.request_id]

    # -- SchedulerObserver -------------------------------------------------------------------------------------------

    def admitted(self, sequence: Sequence) -> None:
        self._admitted.append(sequence.request_id)
        cached = sequence.cached_tokens or 0
        host, storage = sequence.restored_tokens
        timeline = self._timelines[sequence.request_id]
        self._metrics.admitted(
            prompt_tokens=sequence.prompt.size,
            cached_tokens={"device": cached - host - storage, "host": host, "storage": storage},
            queued_s=(time.monotonic_ns() - timeline.submitted) / 1e9,
        )
        miss = self._cache.explain_miss(sequence.key, cached)
        self._journal.admitted(
            request_id=sequence.request_id,
            prompt_tokens=sequence.prompt.size,
            cached_tokens=cached,
            reason=miss.reason,
            sentence=miss.sentence,
            in_namespace=sequence.request.namespace != DEFAULT_NAMESPACE,
            same=miss.same,
            prompt_goes_on=miss.prompt_goes_on,
            cached_goes_on=miss.cached_goes_on,
        )

    def streamed(self, delta: RequestDelta) -> None:
        self._deltas.append(delta)
        timeline = self._timelines[delta.request_id]
        now = time.monotonic_ns()
        if timeline.last is not None and delta.token_ids:
            for _ in delta.token_ids:
                self._metrics.token((now - timeline.last) / 1e9 / len(delta.token_ids))
        if delta.token_ids:
            timeline.last = now

    def stepped(self, times: StepTimes) -> None:
        self._metrics.stepped(
            schedule_s=times.schedule / 1e9, prepare_s=times.prepare / 1e9, execute_s=times.execute / 1e9
        )

    # -- from the engine's loop --------------------------------------------------------------------------------------

    def take_deltas(self) -> list[RequestDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    def take_admitted(self) -> list[str]:
        """Ids of requests that were started since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def ended(self, output: RequestOutput, told_an_error: bool) -> None:
        """The request is over. Errors are counted where they are told."""
        timeline = self._timelines.pop(output.request_id)
        if told_an_error:
            return
        waited = timeline.added - timeline.submitted
        self._metrics.ended(
            reason=output.finish_reason,
            output_tokens=len(output.token_ids),
            first_token_s=None if output.first_token_ns is None else (waited + output.first_token_ns) / 1e9,
            e2e_s=(time.monotonic_ns() - timeline.submitted) / 1e9,
        )

    def measure(self, scheduler: Scheduler, adapter: SchedulerAdapter) -> None:
        """After a step: how things stand. A few plain reads."""
        self.num_tokens = scheduler.num_tokens
        self.num_running, self.num_waiting = scheduler.num_running, scheduler.num_waiting
        page, pages = adapter.page_size, adapter.page_counts()
        self._metrics.measured(
            running=self.num_running,
            waiting=self.num_waiting,
            generated_tokens=self.num_tokens,
            evicted_tokens=adapter.num_evicted_pages * page,
            retractions=scheduler.num_retractions,
        )
        self._metrics.filled(
            pool_tokens=adapter.capacity * page,
            free_tokens=pages.free * page,
            evictable_tokens=pages.cached_unlocked * page,
        )
        self._restores.look(page)
