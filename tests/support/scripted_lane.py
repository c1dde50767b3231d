"""A storage lane without threads: what it answers, and when, is what the test says."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from app.core.transfers import Fetch, Lookup, OfEachPool, PageKeys, Store, TransferEnd
from app.hicache.ports import LaneEnd
from app.tpu.page_carrier import PageArrays, PoolContents


@dataclass
class ScriptedLane:
    """values: what is stored, by pool kind and key.

    is_held: ends come only by `release`. failures: by number of the transfer. cut: fetches whose answers lack a page.
    """

    values: dict[tuple[int, bytes], PageArrays] = field(default_factory=dict)
    is_held: bool = False
    failures: dict[int, str] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)
    cancelled: list[int] = field(default_factory=list)
    close_timeouts: list[float] = field(default_factory=list)
    _done: list[LaneEnd] = field(default_factory=list)
    _held: list[LaneEnd] = field(default_factory=list)
    _wake: threading.Event = field(default_factory=threading.Event)

    def store(self, intent: Store, contents: PoolContents) -> None:
        failure = self.failures.get(intent.number)
        for kind, (keys, of_kind) in enumerate(zip(intent.keys, contents, strict=True)):
            for key, page in zip(keys, of_kind, strict=True):
                if failure is None:
                    self.values[kind, key] = page
        self._answer(intent.number, intent.keys, None, have=failure is None)

    def lookup(self, intent: Lookup) -> None:
        self._answer(intent.number, intent.keys, None, have=True)

    def fetch(self, intent: Fetch) -> None:
        less = -1 if intent.number in self.cut else None
        contents = OfEachPool(
            *([self.values.get((kind, key)) for key in keys][:less] for kind, keys in enumerate(intent.keys))
        )
        self._answer(intent.number, intent.keys, contents, have=True)

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)
        for held in list(self._held):
            if held.end.number == number:
                self._held.remove(held)
                nothing = OfEachPool(*([None] * len(each) for each in held.contents or ((), (), ())))
                arrived = OfEachPool(*(np.zeros(len(each), np.bool_) for each in nothing))
                end = TransferEnd(number=number, failure="cancelled", arrived=arrived)
                self._done.append(LaneEnd(end=end, contents=nothing))
                self._wake.set()

    def release(self) -> None:
        """Everything that is held has ended. From any thread."""
        self._done += self._held
        self._held = []
        self._wake.set()

    def take_ends(self) -> list[LaneEnd]:
        done, self._done = self._done, []
        return done

    def wake_with(self, event: threading.Event) -> None:
        self._wake = event

    def close(self, timeout_s: float) -> None:
        self.close_timeouts.append(timeout_s)

    def check_integrity(self) -> None:
        """Nothing to check."""

    def _answer(
        self,
        number: int,
        keys: PageKeys,
        contents: OfEachPool[Sequence[PageArrays | None]] | None,
        *,
        have: bool,
    ) -> None:
        arrived = OfEachPool(
            *(
                np.array([have and (kind, key) in self.values for key in of_kind], np.bool_)
                for kind, of_kind in enumerate(keys)
            )
        )
        end = TransferEnd(number=number, failure=self.failures.get(number), arrived=arrived)
        lane_end = LaneEnd(end=end, contents=None if end.failure else contents)
        if self.is_held:
            self._held.append(lane_end)
        else:
            self._done.append(lane_end)
            self._wake.set()
