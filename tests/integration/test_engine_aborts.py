"""A client gives up at any moment: one terminal reply, nothing after it, nothing kept, nobody else disturbed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from app.errors import RequestError
from tests.support.engine import Engine

OpenEngine = Callable[..., Engine]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
def test_an_abort_at_every_step_of_a_life(engine: OpenEngine, cache_type: str, overlap: bool) -> None:
    """Queued, between chunks, decoding, retracted: after each number of steps, in a pool that forces retraction."""
    statuses = set()
    for steps in range(32):
        opened = engine(cache_type=cache_type, disable_overlap=not overlap, max_total_tokens=48, chunked_prefill_size=8)
        for index in range(3):
            opened.add([index] * 10, max_tokens=16)
        opened.step(steps)
        victim = f"r{(1, 2, 1)[steps % 3]}"
        sequence = opened.scheduler._sequences.get(victim)
        statuses.add((sequence.status.value, bool(sequence.output)) if sequence else None)

        opened.scheduler.abort(victim)
        opened.check()
        opened.scheduler.abort(victim)
        opened.drain()

        opened.check_replies()
        opened.check_idle()
        assert sum(output.finish_reason == "abort" for output in opened.outputs.values()) <= 1

    assert {("waiting", False), ("prefill", False), ("decode", True)} <= statuses
    assert ("waiting", True) in statuses, "no abort of a retracted request"


def test_everybody_aborts_at_once(engine: OpenEngine) -> None:
    for steps in range(8):
        opened = engine(chunked_prefill_size=8)
        for index in range(8):
            opened.add([*range(12), index], max_tokens=9)
        opened.step(steps)

        for index in range(8):
            opened.scheduler.abort(f"r{index}")
        opened.drain(max_steps=4)

        opened.check_idle()
        opened.check_replies()


def test_an_unknown_id_is_nobody(engine: OpenEngine) -> None:
    opened = engine()

    opened.scheduler.abort("nobody")

    assert not opened.scheduler.has_work()
    opened.serve([1], max_tokens=1)
    opened.scheduler.abort("r0")
    assert not opened.scheduler.has_work()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_id_that_is_being_served_is_refused_and_goes_on(engine: OpenEngine, steps: int) -> None:
    """H30: a client-set id never replaces somebody's request."""
    opened = engine()
    opened.add(range(10), "same", max_tokens=8)
    opened.step(steps)
    kept = opened.requests["same"]

    with pytest.raises(RequestError, match="request_id"):
        opened.add(range(5), "same", max_tokens=2)

    assert opened.requests["same"] is kept
    opened.drain()
    opened.check_replies()


def test_an_id_may_be_used_again_when_its_request_has_ended(engine: OpenEngine) -> None:
    """Also at once, while a step that computes for the first owner is still in flight."""
    for steps in range(6):
        opened = engine()
        opened.add(range(10), "same", max_tokens=8)
        opened.step(steps)
        opened.scheduler.abort("same")
        opened.step(0)
        first = opened.scheduler._outputs

        assert [output.request_id for output in first] == ["same"]
        opened.step()
        opened.add(range(20, 35), "same", max_tokens=5)
        opened.drain()

        opened.check_replies()
        assert opened.outputs["same"].finish_reason == "length"


def test_a_request_that_waits_for_an_aborted_peer_proceeds(engine: OpenEngine) -> None:
    """In-batch waiting ends with the peer, not with the peer's success."""
    for steps in range(1, 6):
        opened = engine(chunked_prefill_size=8)
        shared = list(range(40))
        opened.add([*shared, 1], "peer", max_tokens=4)
        opened.add([*shared, 2], "waits", max_tokens=4)
        opened.step(steps)
        assert opened.scheduler.num_waiting == (1 if steps < 6 else 0)

        opened.scheduler.abort("peer")
        opened.drain()

        opened.check_replies()
        assert opened.outputs["waits"].finish_reason == "length"


def test_the_queue_can_be_emptied_by_aborts(engine: OpenEngine) -> None:
    """H03: a match without admission changes nothing that survives."""
    opened = engine(max_running_requests=1)
    opened.serve(range(16), max_tokens=1)
    opened.add(range(40), "runs", max_tokens=20)
    for index in range(10):
        opened.add([*range(16), index], f"q{index}", max_tokens=5)
    opened.step(3)
    before = opened.scheduler.ledger()["cached_protected"]

    for index in range(10):
        opened.scheduler.abort(f"q{index}")

    assert opened.scheduler.num_waiting == 0
    assert opened.scheduler.ledger()["cached_protected"] == before
    opened.drain()
    opened.check_replies()
