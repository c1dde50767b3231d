"""Serving a list of requests to the end, and leaving the scheduler clean on every way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from app.core.sampling import SamplingParams
from app.errors import RequestError
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from tests.support.engine import Engine, cold_tokens

OpenEngine = Callable[..., Engine]


def request(request_id: str, length: int, **sampling: Any) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=np.arange(length, dtype=np.int32),
        sampling=SamplingParams(**{"ignore_eos": True, **sampling}),
    )


def test_replies_come_in_the_order_of_the_requests(engine: OpenEngine) -> None:
    scheduler = engine().scheduler
    requests = [request("long", 5, max_tokens=9), request("none", 4, max_tokens=0), request("short", 3, max_tokens=1)]

    outputs = generate_all(scheduler, requests)

    assert [output.request_id for output in outputs] == ["long", "none", "short"]
    assert outputs[0].token_ids == cold_tokens(np.arange(5, dtype=np.int32), 9)
    assert not scheduler.has_work()
    assert generate_all(scheduler, []) == []


def test_one_refused_request_serves_none(engine: OpenEngine) -> None:
    scheduler = engine().scheduler

    with pytest.raises(RequestError, match="context length"):
        generate_all(scheduler, [request("good", 5), request("too long", 200)])

    assert not scheduler.has_work()


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_an_id_given_twice_is_refused(engine: OpenEngine, max_tokens: int) -> None:
    """Also when the first of the two has ended by the time of the second: replies are told apart by their ids."""
    scheduler = engine().scheduler
    requests = [request("same", 5, max_tokens=max_tokens), request("same", 6, max_tokens=max_tokens)]

    with pytest.raises(RequestError, match="request_id"):
        generate_all(scheduler, requests)

    assert not scheduler.has_work()


def test_replies_to_others_do_not_count(engine: OpenEngine) -> None:
    opened = engine()
    for index in range(3):
        opened.scheduler.add(request(f"other{index}", 3, max_tokens=1))

    outputs = generate_all(opened.scheduler, [request("mine", 5, max_tokens=12)])

    assert outputs[0].token_ids == cold_tokens(np.arange(5, dtype=np.int32), 12)


@pytest.mark.parametrize("interrupted_wait", [0, 1, 4])
def test_an_interrupt_while_waiting_leaves_a_clean_scheduler(
    engine: OpenEngine, interrupted_wait: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C arrives where a process spends its time: in the wait for the device."""
    from app.runtime.step_handle import LocalStepHandle

    opened = engine()
    waits = 0
    wait = LocalStepHandle.wait

    def interrupt(handle: LocalStepHandle, timeout: float | None = None) -> Any:
        nonlocal waits
        waits += 1
        if waits == interrupted_wait + 1:
            raise KeyboardInterrupt
        return wait(handle, timeout)

    monkeypatch.setattr(LocalStepHandle, "wait", interrupt)

    with pytest.raises(KeyboardInterrupt):
        generate_all(opened.scheduler, [request("a", 30, max_tokens=9), request("b", 5, max_tokens=9)])

    assert not opened.scheduler.has_work()
    opened.check_idle()
    assert generate_all(opened.scheduler, [request("c", 5, max_tokens=3)])[0].finish_reason == "length"
