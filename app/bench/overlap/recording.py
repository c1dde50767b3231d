"""When steps ran and when pages travelled: stand-ins that pass every call on and note its begin and its end.

What ends by itself is watched by threads of the recorder's own: its end is when it was, not when somebody asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from app.bench.timed import TimedRuntime
from app.core.batch import PreparedBatch, StepHandle
from app.core.transfers import Fetch, Lookup, Store
from app.hicache.ports import LaneEnd, StorageLane
from app.runtime.interface import RuntimeInterface
from app.tpu.page_carrier import PoolContents
from app.tpu.tier_copies import TierCopies, TierCopy

Lane = Literal["compute", "to device", "to host", "storage"]
LANES: tuple[Lane, ...] = ("compute", "to device", "to host", "storage")
_WATCHERS = 8
_POLL_S = 0.0003


class Event(NamedTuple):
    """Seconds of time.monotonic. rows: of a step; num_bytes: of a copy."""

    lane: Lane
    begin: float
    end: float
    rows: int = 0
    num_bytes: int = 0


class Recorder:
    """Collects events, from any thread."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._watchers = ThreadPoolExecutor(_WATCHERS, thread_name_prefix="recorder")

    def add(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def watch(
        self, lane: Lane, begin: float, until: Callable[[], object], *, rows: int = 0, num_bytes: int = 0
    ) -> None:
        """An event that is over when `until` returns; none if that raises."""

        def wait() -> None:
            until()
            self.add(Event(lane, begin, time.monotonic(), rows, num_bytes))

        self._watchers.submit(wait)

    def since(self, begin: float) -> list[Event]:
        """Those that began then or later, by their begin."""
        with self._lock:
            return sorted(event for event in self._events if event.begin >= begin)

    def close(self) -> None:
        self._watchers.shutdown()


class RecordedCopies:
    """TierCopies."""

    def __init__(self, copies: TierCopies, recorder: Recorder) -> None:
        self._copies = copies
        self._recorder = recorder

    def to_host(self, contents: PoolContents) -> TierCopy:
        return self._begin("to host", self._copies.to_host, contents)

    def to_device(self, contents: PoolContents) -> TierCopy:
        return self._begin("to device", self._copies.to_device, contents)

    def _begin(self, lane: Lane, copy_of: Callable[[PoolContents], TierCopy], contents: PoolContents) -> TierCopy:
        began = time.monotonic()
        copy = copy_of(contents)
        self._recorder.watch(lane, began, copy.result, num_bytes=copy.num_bytes)
        return copy


class RecordedLane:
    """StorageLane. The end of a transfer is what it says of itself."""

    def __init__(self, lane: StorageLane, recorder: Recorder) -> None:
        self._lane = lane
        self._recorder = recorder
        self._begun: dict[int, float] = {}
        self.cancel = lane.cancel
        self.wake_with = lane.wake_with
        self.close = lane.close
        self.check_integrity = lane.check_integrity

    def store(self, intent: Store, contents: PoolContents) -> None:
        self._begun[intent.number] = time.monotonic()
        self._lane.store(intent, contents)

    def lookup(self, intent: Lookup) -> None:
        self._begun[intent.number] = time.monotonic()
        self._lane.lookup(intent)

    def fetch(self, intent: Fetch) -> None:
        self._begun[intent.number] = time.monotonic()
        self._lane.fetch(intent)

    def take_ends(self) -> list[LaneEnd]:
        ends = self._lane.take_ends()
        for each in ends:
            began, end = self._begun.pop(each.end.number), each.end
            self._recorder.add(Event("storage", began, began + end.seconds, num_bytes=end.num_bytes))
        return ends


class RecordedRuntime(TimedRuntime):
    """A RuntimeInterface. Steps without rows are no events: nothing is computed in them."""

    def __init__(self, runtime: RuntimeInterface, recorder: Recorder) -> None:
        super().__init__(runtime)
        self._recorder = recorder

    def execute_batch(self, prepared: PreparedBatch) -> StepHandle:
        rows = prepared.page_offsets.size - 1
        began = time.monotonic()
        handle = super().execute_batch(prepared)
        if rows > 0:
            self._recorder.watch("compute", began, lambda: _until(handle.done), rows=rows)
        return handle


def merged(events: Iterable[Event]) -> list[tuple[float, float]]:
    """The times at which at least one of them was going on, ascending and apart."""
    spans: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda each: each.begin):
        if spans and event.begin <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], event.end)
        else:
            spans.append((event.begin, event.end))
    return spans


def hidden_share(copies: Iterable[Event], steps: Iterable[Event]) -> float | None:
    """The part of the time of `copies` that lay within `steps`; None if no time was spent."""
    running, copying = merged(steps), merged(copies)
    total = sum(end - begin for begin, end in copying)
    hidden = sum(max(0.0, min(end, until) - max(begin, start)) for begin, end in copying for start, until in running)
    return hidden / total if total > 0 else None


def idle_share(steps: Iterable[Event]) -> float | None:
    """The part of the time from the first to the last of them in which none ran."""
    running = merged(steps)
    if not running or running[-1][1] <= running[0][0]:
        return None
    busy = sum(end - begin for begin, end in running)
    return 1.0 - busy / (running[-1][1] - running[0][0])


def _until(done: Callable[[], bool]) -> None:
    while not done():
        time.sleep(_POLL_S)
