"""Stops asking a storage that does not answer, and asks again now and then."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.errors import IntegrityError


class CircuitBreaker:
    """Closed: calls go through. Open, after `max_failures` in a row: none does. Half-open, when the pause is over: one
    call goes through as a probe; its success closes the breaker, its failure opens it for twice the pause.

    Not safe from several threads: its owner has a lock.
    """

    def __init__(
        self,
        max_failures: int,
        pause_s: float,
        max_pause_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._first_pause_s = self._pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._clock = clock
        self._num_failures = 0
        self._open_until: float | None = None
        self._is_probing = False
        self.num_opened = 0

    @property
    def is_open(self) -> bool:
        """Whether a call would be refused now."""
        return self._open_until is not None and (self._is_probing or self._clock() < self._open_until)

    def admit(self) -> bool:
        """Whether a call may go through. One that may must end in `succeeded` or `failed`."""
        if self.is_open:
            return False
        self._is_probing = self._open_until is not None
        return True

    def succeeded(self) -> None:
        self._num_failures = 0
        self._open_until = None
        self._is_probing = False
        self._pause_s = self._first_pause_s

    def failed(self) -> None:
        self._num_failures += 1
        if self._is_probing:
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
        elif self._num_failures < self._max_failures or self._open_until is not None:
            return  # also a call that began before the breaker opened
        self._is_probing = False
        self._open_until = self._clock() + self._pause_s
        self.num_opened += 1

    def check_integrity(self) -> None:
        if self._is_probing and self._open_until is None:
            raise IntegrityError(owner="CircuitBreaker", broken="a probe while closed")
