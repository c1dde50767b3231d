"""One transfer of the storage lane, from its keys to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from app.core.transfers import OfEachPool, PageKeys, TransferEnd
from app.hicache.ports import LaneEnd
from app.hicache.storage.base import Operation, Outcome
from app.hicache.storage.chunks import Ticket
from app.hicache.storage.workers import StorageWorkers
from app.tpu.page_carrier import PageArrays

_DONE = {
    Operation.SET: frozenset({Outcome.STORED, Outcome.PRESENT}),
    Operation.GET: frozenset({Outcome.HIT}),
    Operation.EXISTS: frozenset({Outcome.HIT}),
}
_Kind = TypeVar("_Kind")

_MOVED = {Operation.SET: Outcome.STORED, Operation.GET: Outcome.HIT}


class LaneTransfer:
    """Collects the answers to its keys, in whatever order they come. Its owner has a lock."""

    def __init__(
        self,
        *,
        number: int,
        operation: Operation,
        keys: PageKeys,
        page_bytes: OfEachPool[int],
        workers: StorageWorkers | None,
    ) -> None:
        """workers: who is asked; None for nobody, and then it is over at once."""
        self.number = number
        self.workers = workers
        self.tickets: list[Ticket] = []
        self.num_unanswered = 0 if workers is None else sum(map(len, keys))
        self._operation = operation
        self._page_bytes = page_bytes
        self._answers: list[list[Outcome | None]] = [[None] * len(of_kind) for of_kind in keys]
        self._pages: list[list[PageArrays | None]] = [[None] * len(of_kind) for of_kind in keys]
        self._started = time.monotonic()

    def answer(self, kind: int, first: int, outcomes: Sequence[Outcome], pages: Sequence[PageArrays | None]) -> None:
        """To some of the keys of this kind, 0 to 2, from `first` on. pages: of a fetch, those that came."""
        end = first + len(outcomes)
        self._answers[kind][first:end] = outcomes
        self._pages[kind][first:end] = pages
        self.num_unanswered -= len(outcomes)

    def end(self) -> LaneEnd:
        """When nothing is unanswered. `failure` is the outcome of the first key that did not do."""
        done = _DONE[self._operation]
        arrived = _of_each([np.array([each in done for each in kind], bool) for kind in self._answers])
        end = TransferEnd(
            number=self.number,
            failure=self._failure(),
            arrived=arrived,
            num_bytes=self._num_bytes(),
            seconds=time.monotonic() - self._started,
        )
        return LaneEnd(end=end, contents=_of_each(self._pages) if self._operation is Operation.GET else None)

    def broken(self) -> str | None:
        """In words, what is wrong with it; None for nothing."""
        unanswered = sum(each is None for kind in self._answers for each in kind)
        if not unanswered == self.num_unanswered > 0:
            return f"transfer {self.number} waits for {self.num_unanswered} answers and lacks {unanswered}"
        return None

    def _failure(self) -> str | None:
        if self.workers is None:
            return "detached"
        fine = _DONE[self._operation]
        if self._operation is Operation.EXISTS:
            fine = fine | {Outcome.ABSENT}
        for kind in self._answers:
            for each in kind:
                if each is not None and each not in fine:
                    return each.value
        return None

    def _num_bytes(self) -> int:
        moved = _MOVED.get(self._operation)
        return sum(
            num_bytes * sum(each is not None and each is moved for each in kind)
            for num_bytes, kind in zip(self._page_bytes, self._answers, strict=True)
        )


def _of_each(kinds: Sequence[_Kind]) -> OfEachPool[_Kind]:
    pages, window_pages, states = kinds
    return OfEachPool(pages, window_pages, states)
