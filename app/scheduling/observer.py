"""What a scheduler tells whoever watches it: a server that streams, metrics, a page that shows the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from app.scheduling.request import RequestDelta, Sequence


@dataclass(slots=True)
class StepTimes:
    """Where the time of one `Scheduler.step` went, ns. The three add up to the step.

    prepare, execute: inside the runtime's two calls; execute also holds the wait for the step before.
    schedule: the rest: planning, taking in tokens, making text.
    """

    schedule: int = 0
    prepare: int = 0
    execute: int = 0


class SchedulerObserver(Protocol):
    """Called on the scheduler's thread, between two boundary calls: be quick, and call nothing of the scheduler."""

    def admitted(self, sequence: Sequence) -> None:
        """The sequence got a row for the first time; its `cached_tokens` are now final."""
        ...

    def streamed(self, delta: RequestDelta) -> None:
        """A streamed request has new tokens. The last delta of a request comes before its terminal reply."""
        ...

    def stepped(self, times: StepTimes) -> None:
        """A step is over; what ended in it is returned by `step` after this."""
        ...


class Unobserved:
    """Nobody watches."""

    def admitted(self, sequence: Sequence) -> None:
        pass

    def streamed(self, delta: RequestDelta) -> None:
        pass

    def stepped(self, times: StepTimes) -> None:
        pass
