"""Storage apart from the thread that dispatches: bounded queues, threads that serve them, and an answer in any case.

Every key that is asked for is answered once: by the storage, by its deadline, by a full queue, by the open breaker, by
`cancel` or by `close`. So a storage that never answers costs its threads and nothing else.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import structlog

from app.errors import IntegrityError
from app.hicache.storage.base import (
    Deadline,
    Got,
    HiCacheStorage,
    Operation,
    Outcome,
    PageKey,
    has_passed,
    remaining_s,
)
from app.hicache.storage.breaker import CircuitBreaker
from app.hicache.storage.chunks import Arrival, Arrived, Chunk, ChunkQueue, ChunkState, Payload, Ticket
from app.hicache.storage.counters import StorageCounters
from app.hicache.storage.value import ValueCodec
from app.hicache.storage.verbs import FAILURES, StorageVerbs

_log = structlog.get_logger(__name__)

_MAX_SPENT = 256  # deadlines of settled chunks that are kept, beside as many as there are live ones
_COPY_S = 0.001  # after which a deadline that met a copy is looked at again


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """How much a storage tier may do at the same time, and for how long it is waited for."""

    concurrency: int = 4  # threads, each with one call to the storage
    pages_per_call: int = 8  # of a read or a write
    keys_per_call: int = 256  # where no value moves
    max_queued_chunks: int = 1024  # of reads, and as many of writes
    max_queued_bytes: int = 512 * 2**20  # likewise
    max_attempts: int = 3
    backoff_s: float = 0.02  # before the second attempt; doubles with each
    max_failures: int = 5  # calls in a row, after which the breaker opens
    pause_s: float = 1.0
    max_pause_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoad:
    """What the workers have to do at the moment."""

    queued_reads: int  # chunks
    queued_writes: int
    queued_bytes: int  # of both
    running: int  # calls to the storage, those given up included
    given_up: int  # calls that have not come back although their deadline passed
    breaker_open: bool


class StorageWorkers:
    """The owner of one storage, whose values may be of several kinds: of each codec. Safe from any thread.

    A callback gets an Arrival as soon as a few pages have come, in a worker's thread, or in the caller's own for what
    is refused at once. It must be quick and raise nothing; the `put` of a queue is a good one.
    """

    def __init__(self, storage: HiCacheStorage, limits: WorkerLimits | None = None) -> None:
        """Starts the threads. `storage` is closed by `close`."""
        self._storage = storage
        self._limits = limits = limits or WorkerLimits()
        self._lock = threading.Lock()  # guards everything below
        self._work = threading.Condition(self._lock)  # a chunk waits, or all is over
        self._expiry = threading.Condition(self._lock)  # another deadline is the next one, or all is over
        self._idle = threading.Condition(self._lock)  # a chunk was settled
        self._reads = ChunkQueue(limits.max_queued_chunks, limits.max_queued_bytes)
        self._writes = ChunkQueue(limits.max_queued_chunks, limits.max_queued_bytes)
        self._live: set[Chunk] = set()  # not settled
        self._called: set[Chunk] = set()  # taken by a thread that has not come back
        self._overdue: set[Chunk] = set()  # those of them of which the breaker was told
        self._num_telling = 0  # chunks that are settled, but whose callbacks have not returned
        self._deadlines: list[tuple[Deadline, int, Chunk]] = []  # a heap, with a number that settles ties
        self._numbers = itertools.count()
        self._breaker = CircuitBreaker(limits.max_failures, limits.pause_s, limits.max_pause_s)
        self._counters = StorageCounters()
        self._is_closing = False
        self._stopped = threading.Event()
        self._verbs = StorageVerbs(storage)
        names = [("storage-deadlines", self._watch_deadlines)]
        names += [(f"storage-{index}", self._serve_queues) for index in range(limits.concurrency)]
        # Daemons: a storage that never answers must not keep the process alive.
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for name, run in names]
        for thread in self._threads:
            thread.start()

    # -- requests ----------------------------------------------------------------------------------------------------

    def get(self, codec: ValueCodec, keys: Sequence[PageKey], arrived: Arrived, deadline: Deadline) -> Ticket:
        """Read pages that `codec` is of. A HIT comes with the payload, (page bytes,) uint8, which nobody writes to.

        All else is a miss.
        """
        return self._submit(Operation.GET, keys, (), arrived, deadline, codec)

    def exists(self, keys: Sequence[PageKey], arrived: Arrived, deadline: Deadline) -> Ticket:
        """HIT for each key that has a value, good or not."""
        return self._submit(Operation.EXISTS, keys, (), arrived, deadline)

    def set(
        self,
        codec: ValueCodec,
        keys: Sequence[PageKey],
        payloads: Sequence[Payload],
        arrived: Arrived,
        deadline: Deadline,
    ) -> Ticket:
        """Write pages that `codec` is of, each (page bytes,) uint8 and contiguous, or made so by a worker.

        STORED, or PRESENT where there was a value already.

        The payloads are read until the page's arrival and not after: what the storage reads is a copy of its own.
        """
        wrong = [len(payload) for payload in payloads if len(payload) != codec.payload_bytes]
        if wrong or len(keys) != len(payloads):
            raise ValueError(f"{len(keys)} keys need as many pages of {codec.payload_bytes} bytes, not {wrong}")
        return self._submit(Operation.SET, keys, payloads, arrived, deadline, codec)

    def delete(self, keys: Sequence[PageKey], arrived: Arrived, deadline: Deadline) -> Ticket:
        return self._submit(Operation.DELETE, keys, (), arrived, deadline)

    def cancel(self, ticket: Ticket) -> None:
        """Give up what has not come. Writes that are under way still end by themselves."""
        with self._lock:
            chunks = [each for each in self._live if each.ticket == ticket and self._may_cancel(each)]
        self._settle_all(chunks, Outcome.CANCELLED)

    def clear(self, deadline: Deadline) -> int:
        """Delete every value of ours, in the caller's thread, past all queues. -> how many."""
        return self._storage.clear(deadline)

    # -- state -------------------------------------------------------------------------------------------------------

    def counters(self) -> StorageCounters:
        """A copy."""
        with self._lock:
            return self._counters.snapshot()

    def load(self) -> WorkerLoad:
        with self._lock:
            return WorkerLoad(
                queued_reads=self._reads.num_chunks,
                queued_writes=self._writes.num_chunks,
                queued_bytes=self._reads.num_bytes + self._writes.num_bytes,
                running=len(self._called),
                given_up=len(self._called - self._live),
                breaker_open=self._breaker.is_open,
            )

    def wait_idle(self, timeout_s: float) -> bool:
        """Until everything that was asked for is answered. -> whether it is."""
        with self._lock:
            return self._idle.wait_for(lambda: not (self._live or self._num_telling), timeout_s)

    def close(self, timeout_s: float) -> WorkerLoad:
        """Drop the reads, write what is queued, and drop that too when the time is over; then close the storage.

        Takes at most `timeout_s` for the writes, and as much again for what does not come back. -> what was left: with
        calls that never came back, the storage is left open to them.
        """
        with self._lock:
            self._is_closing = True
            reads = [chunk for chunk in self._live if self._may_cancel(chunk) and chunk.operation is not Operation.SET]
        self._settle_all(reads, Outcome.CLOSED)
        self.wait_idle(timeout_s)
        with self._lock:
            # What is being copied now is answered by its own thread, which sees that it is over.
            rest = [chunk for chunk in self._live if chunk.state is not ChunkState.COPYING]
            self._stopped.set()
            self._work.notify_all()
            self._expiry.notify_all()
        self._settle_all(rest, Outcome.CLOSED)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(remaining_s(deadline))
        if not any(thread.is_alive() for thread in self._threads):
            closing = threading.Thread(target=self._storage.close, name="storage-close", daemon=True)
            closing.start()
            closing.join(remaining_s(deadline))
        return self.load()

    def check_integrity(self) -> None:
        """Queues, breaker and the sets of chunks agree. The storage has a check of its own."""
        with self._lock:
            self._reads.check_integrity()
            self._writes.check_integrity()
            self._breaker.check_integrity()
            waiting = {chunk for chunk in self._live if chunk.state is ChunkState.QUEUED}
            if len(waiting) != self._reads.num_chunks + self._writes.num_chunks:
                raise IntegrityError(owner="StorageWorkers", broken=f"{len(waiting)} chunks wait, others are queued")
            if any(chunk.state is ChunkState.SETTLED for chunk in self._live) or self._live - waiting - self._called:
                raise IntegrityError(
                    owner="StorageWorkers", broken="a chunk is neither queued, nor served, nor settled"
                )

    # -- queueing ----------------------------------------------------------------------------------------------------

    def _submit(
        self,
        operation: Operation,
        keys: Sequence[PageKey],
        payloads: Sequence[Payload],
        arrived: Arrived,
        deadline: Deadline,
        codec: ValueCodec | None = None,
    ) -> Ticket:
        refused: list[tuple[Chunk, Outcome]] = []
        step = self._limits.keys_per_call if codec is None else self._limits.pages_per_call
        value_bytes = 0 if codec is None else codec.value_bytes
        with self._lock:
            ticket = Ticket(next(self._numbers))
            for first in range(0, len(keys), step):
                here = slice(first, first + step)
                num_bytes = value_bytes * len(keys[here])
                chunk = Chunk(operation, ticket, first, keys[here], payloads[here], deadline, num_bytes, arrived, codec)
                refusal = self._refusal(chunk)
                if refusal is None:
                    self._enqueue(chunk)
                else:
                    chunk.state = ChunkState.RUNNING  # it waits in no queue
                    refused.append((chunk, refusal))
        for chunk, refusal in refused:
            self._settle_all([chunk], refusal)
        return ticket

    def _refusal(self, chunk: Chunk) -> Outcome | None:
        if self._is_closing:
            return Outcome.CLOSED
        if self._breaker.is_open:
            return Outcome.BREAKER_OPEN
        return None if self._queue_of(chunk).has_room(chunk) else Outcome.QUEUE_FULL

    def _queue_of(self, chunk: Chunk) -> ChunkQueue:
        return self._writes if chunk.operation is Operation.SET else self._reads

    def _enqueue(self, chunk: Chunk) -> None:
        self._live.add(chunk)
        self._queue_of(chunk).push(chunk)
        if len(self._deadlines) > 2 * (len(self._live) + len(self._called)) + _MAX_SPENT:
            self._deadlines = [each for each in self._deadlines if each[2] in self._live | self._called]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (chunk.deadline, next(self._numbers), chunk))
        if self._deadlines[0][2] is chunk:
            self._expiry.notify()
        self._work.notify()

    # -- one answer for each chunk -----------------------------------------------------------------------------------

    def _settle_all(self, chunks: Iterable[Chunk], outcome: Outcome) -> None:
        for chunk in chunks:
            results = [Got(outcome)] * len(chunk.keys)
            with self._lock:
                is_first = self._settle(chunk, results)
            if is_first:
                self._tell(chunk, results)

    def _settle(self, chunk: Chunk, results: Sequence[Got]) -> bool:
        """With the lock held: `results` are the answer, unless there is one. -> whether to tell the caller."""
        if chunk.state is ChunkState.SETTLED:
            return False
        if chunk.state is ChunkState.QUEUED:
            self._queue_of(chunk).forget(chunk)
        chunk.state = ChunkState.SETTLED
        self._live.discard(chunk)
        self._num_telling += 1
        page_bytes = 0 if chunk.codec is None else chunk.codec.payload_bytes
        self._counters.count(chunk.operation, [each.outcome for each in results], page_bytes)
        return True

    def _tell(self, chunk: Chunk, results: Sequence[Got]) -> None:
        """Without the lock."""
        try:
            chunk.arrived(Arrival(chunk.ticket, chunk.first, results))
        except Exception:
            _log.exception("storage_callback_failed", operation=chunk.operation)
            with self._lock:
                self._counters.num_callback_errors += 1
        with self._lock:
            chunk.payloads = ()
            self._num_telling -= 1
            self._idle.notify_all()

    @staticmethod
    def _may_cancel(chunk: Chunk) -> bool:
        return chunk.state is ChunkState.QUEUED or chunk.operation is not Operation.SET

    def _watch_deadlines(self) -> None:
        """Thread: whatever is not answered by its deadline is LATE."""
        while True:
            with self._lock:
                while not self._stopped.is_set() and not (self._deadlines and has_passed(self._deadlines[0][0])):
                    wait_s = remaining_s(self._deadlines[0][0]) if self._deadlines else None
                    self._expiry.wait(None if wait_s is None else min(wait_s, threading.TIMEOUT_MAX))
                if self._stopped.is_set():
                    return
                _, number, chunk = heapq.heappop(self._deadlines)
                if chunk.state is ChunkState.COPYING:
                    heapq.heappush(self._deadlines, (time.monotonic() + _COPY_S, number, chunk))
                    continue
                if chunk in self._called:
                    self._overdue.add(chunk)
                    self._breaker.failed()
            self._settle_all([chunk], Outcome.LATE)

    # -- serving -----------------------------------------------------------------------------------------------------

    def _serve_queues(self) -> None:
        """Thread: reads before writes, since a request waits for them."""
        while (chunk := self._take()) is not None:
            self._finish(chunk, self._serve(chunk))
            del chunk  # nothing of it is kept while this thread waits for the next

    def _finish(self, chunk: Chunk, results: Sequence[Got]) -> None:
        with self._lock:
            self._called.discard(chunk)
            self._overdue.discard(chunk)
            is_first = self._settle(chunk, results)
            self._counters.num_too_late += 0 if is_first else len(chunk.keys)
        if is_first:
            self._tell(chunk, results)

    def _take(self) -> Chunk | None:
        with self._lock:
            while not self._stopped.is_set():
                chunk = self._reads.pop() or self._writes.pop()
                if chunk is not None:
                    is_write = chunk.operation is Operation.SET
                    chunk.state = ChunkState.COPYING if is_write else ChunkState.RUNNING
                    self._called.add(chunk)
                    return chunk
                self._work.wait()
            return None

    def _serve(self, chunk: Chunk) -> Sequence[Got]:
        with self._lock:
            if has_passed(chunk.deadline):
                return [Got(Outcome.LATE)] * len(chunk.keys)
            if not self._breaker.admit():
                return [Got(Outcome.BREAKER_OPEN)] * len(chunk.keys)
        call = self._verbs.prepare(chunk)
        with self._lock:
            if chunk.state is ChunkState.COPYING:
                chunk.state = ChunkState.RUNNING
        if self._stopped.is_set():
            return [Got(Outcome.CLOSED)] * len(chunk.keys)
        results = self._attempt(chunk, call, range(len(chunk.keys)))
        with self._lock:
            if chunk not in self._overdue:  # else the breaker has heard of it
                if any(each.outcome in FAILURES for each in results):
                    self._breaker.failed()
                else:
                    self._breaker.succeeded()
        return results

    def _attempt(
        self, chunk: Chunk, call: Callable[[Sequence[int]], list[Got]], positions: Sequence[int]
    ) -> Sequence[Got]:
        """Call the storage, and once more for the keys that met a fault, until the attempts or the time are used up."""
        results: list[Got] = [Got(Outcome.FAULT)] * len(chunk.keys)
        backoff_s = self._limits.backoff_s
        for _ in range(self._limits.max_attempts):
            started_ns = time.monotonic_ns()
            for position, result in zip(positions, call(positions), strict=True):
                results[position] = result
            with self._lock:
                self._counters.latency[chunk.operation].observe(time.monotonic_ns() - started_ns)
            positions = [position for position in positions if results[position].outcome is Outcome.FAULT]
            wait_s = backoff_s * random.uniform(0.5, 1.5)  # so that many servers do not come back at once
            if not positions or chunk.state is ChunkState.SETTLED or wait_s >= remaining_s(chunk.deadline):
                break
            if self._stopped.wait(wait_s):
                break
            backoff_s *= 2
            with self._lock:
                self._counters.num_retries += len(positions)
        return results
