"""Continuous batching over one runtime, one step ahead of it.

    step k:   plan k+1  ->  prepare, dispatch k+1 (runs behind k)  ->  wait for k  ->  settle k

Rules that make this safe:
  (a) An end known when planning leaves the row out. One known from tokens is seen a step late: the surplus token is
      dropped and its page given back unpublished.
  (b) Pages are published when the completion of the step that wrote them has been read. What is freed or rewritten
      then travels with the next plan, behind every step already dispatched.
  (c) A sequence retracted in flight keeps the token that is owed to it and is not admitted before that is read. An
      aborted one is dropped. Nothing follows a terminal reply.
  (d) If prepare refuses a plan, the running sequence of last rank gives way and the step is planned again, once.
      Before anybody gives way, restores do: a refused plan that had some is planned again without.
  (e) A row is planned only on pages that hold their KV, or get it from the step itself. A request whose prefix is being
      restored from a tier below waits in the queue.
"""

from __future__ import annotations

import time
from dataclasses import replace

import structlog

from app.core.handles import Generation, RequestRuntimeHandle
from app.errors import IntegrityError, RequestError
from app.runtime.interface import RuntimeInterface
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.draft import Outbox
from app.scheduling.finish import FinishRule
from app.scheduling.launching import PATIENCE_S, Launcher
from app.scheduling.limits import SchedulerLimits
from app.scheduling.observer import SchedulerObserver, StepTimes
from app.scheduling.pace import Pace
from app.scheduling.planner import Planner
from app.scheduling.request import FinishReason, Request, RequestOutput, RequestProgress, Sequence, Status
from app.scheduling.running_table import RunningTable
from app.scheduling.settling import InFlight, Settlement
from app.scheduling.waiting import WaitingQueue

_log = structlog.get_logger(__name__)


class Scheduler:
    """Serves requests with one cache and one runtime. Single-threaded: one thread calls every method."""

    def __init__(
        self,
        *,
        adapter: SchedulerAdapter,
        runtime: RuntimeInterface,
        finish_rule: FinishRule,
        limits: SchedulerLimits,
        observer: SchedulerObserver,
    ) -> None:
        self._adapter = adapter
        self._finish_rule = finish_rule
        self._limits = limits
        self._observer = observer
        self._table = RunningTable(limits.max_running_requests, adapter.page_size)
        self._waiting = WaitingQueue(limits.schedule_policy, adapter)
        self._outbox = Outbox()
        self._launcher = Launcher(
            adapter=adapter,
            runtime=runtime,
            planner=Planner(
                adapter=adapter,
                table=self._table,
                waiting=self._waiting,
                outbox=self._outbox,
                chunk_tokens=limits.chunk_tokens,
                snapshot_interval=limits.snapshot_interval if adapter.reuses_prefixes else None,
                retract=self._retract,
                end_for_capacity=self._end_for_capacity,
            ),
            table=self._table,
            waiting=self._waiting,
            outbox=self._outbox,
            limits=limits,
            observer=observer,
        )
        self._settlement = Settlement(
            adapter=adapter,
            table=self._table,
            outbox=self._outbox,
            finish_rule=finish_rule,
            limits=limits,
            observer=observer,
            end=self._end,
        )
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: list[InFlight] = []  # oldest first, at most two
        self._identity = adapter.identity
        self._arrivals = 0
        self._outputs: list[RequestOutput] = []
        self._pace = Pace(adapter.tiers)
        self.num_retractions = 0

    def add(self, request: Request) -> None:
        """Queue a request. RequestError, naming the field and the numbers, if it can never be served."""
        self._limits.check(request, pool_tokens=self._adapter.capacity * self._adapter.page_size)
        if request.request_id in self._sequences:
            raise RequestError(field="request_id", value=request.request_id, allowed="an id that is not being served")
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._limits.seed_of(self._arrivals))
        sequence = Sequence(request, sampling, self._arrivals)
        self._arrivals += 1
        self._sequences[request.request_id] = sequence
        if sampling.max_tokens == 0:
            self._end(sequence, "length")
            return
        self._waiting.add(sequence)

    def abort(self, request_id: str) -> None:
        """End a request now, whatever it is doing; a token in flight for it is dropped. Unknown ids: nothing."""
        self._notice_new_pool()
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._end(sequence, "abort")

    def has_work(self) -> bool:
        return bool(self._sequences or self._in_flight or self._outputs or self._outbox.releases)

    def has_background_work(self) -> bool:
        """Whether something moves, or waits to be moved, between tiers. It does so in steps, also without requests."""
        return self._adapter.tiers.num_under_way > 0

    def step(self, patience_s: float = PATIENCE_S) -> list[RequestOutput]:
        """Dispatch the next step, then take in the one before. -> the requests that ended, in order of ending.

        patience_s: the longest that a step without rows waits for what moves between tiers.
        """
        began = time.perf_counter_ns()
        times = StepTimes()
        self._notice_new_pool()
        launched = self._launcher.launch(
            times, steps_in_flight=len(self._in_flight), num_requests=len(self._sequences), patience_s=patience_s
        )
        if launched is not None:
            self._in_flight.append(launched)
        self._notice_new_pool()
        # Nothing overlaps a step without rows.
        allowed = 1 if launched is not None and launched.num_rows and self._limits.overlap else 0
        while len(self._in_flight) > allowed:
            self._settle_oldest(times)
        if self._limits.check_invariants:
            self.check_integrity()
        times.schedule = time.perf_counter_ns() - began - times.prepare - times.execute
        self._observer.stepped(times)
        outputs, self._outputs = self._outputs, []
        return outputs

    def flush_cache(self) -> int:
        """Drop all cached prefixes and return the pages freed. LockedPageError while a request reads one."""
        self._notice_new_pool()
        return self._adapter.flush()

    @property
    def num_running(self) -> int:
        return self._table.num_running

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        """Output tokens of all requests since the start."""
        return self._settlement.num_tokens

    def progress(self) -> list[RequestProgress]:
        """How far every request is that has not ended, in order of arrival. O(requests)."""
        now = time.monotonic_ns()
        return [
            RequestProgress(
                request_id=seq.request_id,
                status=seq.status.value,
                prompt_tokens=seq.prompt.size,
                cached_tokens=seq.cached_tokens,
                output_tokens=self._known(seq) - seq.prompt.size,
                age_s=(now - seq.arrival_ns) / 1e9,
            )
            for seq in self._sequences.values()
        ]

    def ledger(self) -> dict[str, int]:
        """Pages by class; the classes add up to the pool. For checks and reports: O(pages)."""
        return {name: int(pages.size) for name, pages in self._adapter.ledger().items()}

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every page has exactly one owner and every row is what it seems. O(pages)."""
        self._adapter.check_integrity()
        self._table.check_integrity()
        running = {seq.request_id for seq in self._table.running()}
        waiting = {seq.request_id for seq in self._waiting}
        owed = sum(seq.owed for seq in self._waiting)
        rows = self._limits.max_running_requests - self._launcher.slots_left
        num_owed = self._settlement.num_owed
        for broken, name in (
            (running & waiting or running | waiting != self._sequences.keys(), "a request runs and waits, or neither"),
            (
                owed != num_owed or (owed and not self._in_flight),
                "a token is owed that no step delivers",
            ),
            (rows != len(running) + len(self._outbox.releases), "a row is neither running nor about to be released"),
        ):
            if broken:
                raise IntegrityError(owner="Scheduler", broken=name)

    def _notice_new_pool(self) -> None:
        """The pool may be another one: a step failed as it was dispatched, or the runtime was closed and opened."""
        if self._adapter.identity != self._identity:
            self._lose_pool("the runtime was reopened")

    # -- taking in what a step produced ------------------------------------------------------------------------------

    def _settle_oldest(self, times: StepTimes) -> None:
        step = self._in_flight[0]
        began = time.perf_counter_ns()
        completion = step.handle.wait()
        times.execute += time.perf_counter_ns() - began
        self._in_flight.pop(0)  # not before: the wait may be interrupted, and is then repeated
        if completion.failure is None:
            self._pace.note(step)
            self._settlement.settle(step, completion)
        else:
            self._lose_pool(completion.failure)
            self._adapter.tiers.ended(completion.transfers)

    def _lose_pool(self, reason: str) -> None:
        """The pool is gone: what ran is over, what waits is served from the new one.

        Tokens of steps that ran before the failure are taken in first; with no lease left, nothing of them is cached.
        """
        self._adapter.reset()
        self._identity = self._adapter.identity
        for step in self._in_flight:
            completion = step.handle.wait()
            if completion.failure is None:
                self._settlement.settle(step, completion)
            else:
                reason = completion.failure
                self._adapter.tiers.ended(completion.transfers)
        self._in_flight.clear()
        self._settlement.forgive_all()
        running = self._table.running()
        _log.error("requests_failed", reason=reason, failed=len(running), waiting=self.num_waiting)
        for sequence in running:
            self._end(sequence, "error", reason)
        self._outbox.clear()
        self._launcher.forget_rows()

    # -- leaving a row -----------------------------------------------------------------------------------------------

    def _retract(self, sequence: Sequence) -> None:
        """Back to the queue with the tokens it has; its pages are freed and computed again later. Rule (c)."""
        self._table.up_to_date(sequence.slot)
        if self._table.in_flight(sequence.slot):
            self._settlement.owe(sequence)
        self._adapter.release(sequence.request_id)
        self._vacate(sequence)
        sequence.status = Status.WAITING
        sequence.computed = 0
        sequence.unpublished = False
        sequence.dedup_waits = sequence.num_restores = 0
        sequence.ahead = None
        sequence.rekey()
        self._waiting.add(sequence)
        self.num_retractions += 1

    def _end_for_capacity(self, sequence: Sequence) -> None:
        """The pool cannot hold one token more of it even alone. A token in flight is still waited for."""
        if sequence.status is not Status.WAITING:
            self._table.up_to_date(sequence.slot)
        error = (
            f"the KV pool of {self._adapter.capacity} pages of {self._adapter.page_size} tokens is too small for more "
            f"than {sequence.known} tokens of this request"
        )
        if sequence.status is Status.DECODE and self._table.in_flight(sequence.slot):
            sequence.capacity_error = error
            self._table.end_with_what_is_in_flight(sequence.slot)
        else:
            self._end(sequence, "capacity", error)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """The one way to a terminal reply. Settled tokens are published when the request ended by itself."""
        if sequence.status is Status.WAITING:
            self._settlement.forgive(sequence)
            self._waiting.remove(sequence)
        else:
            self._table.up_to_date(sequence.slot)
            # The last token's KV is not written, or was written by a step whose token is dropped.
            if sequence.status is Status.DECODE and reason in ("stop", "length", "capacity"):
                self._adapter.finish(sequence.request_id, sequence.settled_key(sequence.known - 1))
            self._adapter.release(sequence.request_id)
            self._vacate(sequence)
        sequence.status = Status.ENDED
        del self._sequences[sequence.request_id]
        output = self._finish_rule.output(sequence, reason, error)
        if sequence.request.streams:
            self._observer.streamed(self._finish_rule.delta(sequence))
        self._outputs.append(output)

    def _known(self, sequence: Sequence) -> int:
        """Tokens of it that were read, handed on to it or not."""
        return sequence.known if sequence.status is Status.WAITING else int(self._table.known[sequence.slot])

    def _vacate(self, sequence: Sequence) -> None:
        """Its row goes back with the next plan, and nothing more is told about it."""
        slot = sequence.slot
        self._outbox.release(RequestRuntimeHandle(self._identity.runtime_id, slot, Generation(sequence.generation)))
        self._table.clear(slot)
