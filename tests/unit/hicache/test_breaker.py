"""The circuit breaker, by a clock of the test's own."""

from __future__ import annotations

import pytest

from app.hicache.storage.breaker import CircuitBreaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(3, 1.0, 5.0, clock)


def fail(breaker: CircuitBreaker, times: int) -> None:
    for _ in range(times):
        assert breaker.admit()
        breaker.failed()


def test_opens_after_failures_in_a_row(breaker: CircuitBreaker) -> None:
    fail(breaker, 2)
    assert breaker.admit()
    breaker.succeeded()
    fail(breaker, 2)
    assert not breaker.is_open

    fail(breaker, 1)

    assert (breaker.is_open, breaker.admit(), breaker.num_opened) == (True, False, 1)


def test_one_probe_after_the_pause_closes_it(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    clock.now += 1

    assert [breaker.admit(), breaker.admit(), breaker.is_open] == [True, False, True]
    breaker.succeeded()

    assert [breaker.admit(), breaker.admit()] == [True, True]
    breaker.check_integrity()


def test_a_probe_that_fails_doubles_the_pause_up_to_its_limit(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker, 3)
    for pause in (1, 2, 4, 5, 5):
        clock.now += pause - 0.01
        assert not breaker.admit()
        clock.now += 0.01
        fail(breaker, 1)
    breaker.check_integrity()

    clock.now += 5
    assert breaker.admit()
    breaker.succeeded()
    fail(breaker, 3)
    clock.now += 1
    assert breaker.admit()


def test_a_call_that_began_before_it_opened_does_not_prolong_the_pause(breaker: CircuitBreaker, clock: Clock) -> None:
    assert breaker.admit()
    fail(breaker, 3)
    clock.now += 0.9
    breaker.failed()
    clock.now += 0.1

    assert breaker.admit()
    assert breaker.num_opened == 1
