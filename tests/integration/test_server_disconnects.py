"""A client that goes away takes its request with it: nothing runs for nobody, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.support.asking import CHAT, COMPLETIONS, Asker, body, text_of, wait_until
from tests.support.engine import cold_tokens
from tests.support.paced_model import HeldRunner, SlowRunner, model_runner
from tests.support.raw_http import post, read_events
from tests.support.server import RunningServer, running_server

ENDLESS = 1900  # tokens: several seconds, if nobody ends it
PATHS = [pytest.param(COMPLETIONS, id="completion"), pytest.param(CHAT, id="chat")]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    slow = model_runner(SlowRunner(0.003))
    with running_server(context_length=2048, page_size=16, max_total_tokens=8192, overrides=slow) as running:
        yield running


@pytest.fixture(scope="module")
def asker(server: RunningServer) -> Iterator[Asker]:
    with Asker(server.url) as made:
        yield made


def endless(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "on"}]} if path == CHAT else {"prompt": "and on"}
    return body(**{**prompt, "max_tokens": ENDLESS, **fields})


def ended_early(asker: Asker, generated_before: int) -> bool:
    return asker.info()["generated_tokens"] - generated_before < ENDLESS


@pytest.mark.parametrize("num_events", [1, 2, 12])
@pytest.mark.parametrize("path", PATHS)
def test_leaving_a_stream_ends_its_request(server: RunningServer, asker: Asker, path: str, num_events: int) -> None:
    before = asker.info()["generated_tokens"]

    with post(server.url, path, endless(path, stream=True)) as connection:
        read_events(connection, num_events)
        assert asker.info()["num_requests"] == 1

    asker.wait_until_idle()
    assert ended_early(asker, before)


@pytest.mark.parametrize("num_tokens", [1, 10])
@pytest.mark.parametrize("path", PATHS)
def test_leaving_without_the_whole_reply_ends_its_request(
    server: RunningServer, asker: Asker, path: str, num_tokens: int
) -> None:
    before = asker.info()["generated_tokens"]

    with post(server.url, path, endless(path)):
        wait_until(lambda: asker.info()["generated_tokens"] >= before + num_tokens)

    asker.wait_until_idle()
    assert ended_early(asker, before)


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_ends_every_choice(server: RunningServer, asker: Asker, stream: bool) -> None:
    before = asker.info()["generated_tokens"]

    with post(server.url, COMPLETIONS, endless(COMPLETIONS, stream=stream, n=3, prompt=["one", "two"])):
        wait_until(lambda: asker.info()["num_requests"] == 6)

    asker.wait_until_idle()
    assert ended_early(asker, before)


def test_the_others_are_served_as_if_nobody_had_left(server: RunningServer, asker: Asker) -> None:
    # given: two that stay; all share a prefix
    prompt = [*range(60)]
    expected = text_of(cold_tokens(np.array(prompt, np.int32), 150))
    with ThreadPoolExecutor(2) as pool:
        staying = [pool.submit(way, prompt=prompt, max_tokens=150) for way in (asker.whole, asker.streamed)]

        # when
        for stream in (True, False, True):
            with post(server.url, COMPLETIONS, endless(COMPLETIONS, prompt=prompt, stream=stream)):
                wait_until(lambda: asker.info()["num_running"] >= 2)

        # then
        assert [each.result().choice.text for each in staying] == [expected] * 2
    asker.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_leaving_before_the_first_token_or_while_waiting_ends_the_request(stream: bool) -> None:
    model = HeldRunner()
    with running_server(max_running_requests=1, overrides=model_runner(model)) as server, Asker(server.url) as asker:
        # given: one is being computed, one waits
        before = asker.metrics()["tpukv:prompt_tokens_total"]
        model.hold()
        with post(server.url, COMPLETIONS, body(prompt="first", max_tokens=100, stream=stream)):
            model.wait_until_stuck()
            with post(server.url, COMPLETIONS, body(prompt="second", max_tokens=100, stream=stream)):
                wait_until(lambda: asker.info()["num_requests"] == 2)

        # when
        model.release()

        # then: the one that waited was never started
        asker.wait_until_idle()
        assert asker.metrics()["tpukv:prompt_tokens_total"] - before == len("first")
        assert asker.metrics()["tpukv:request_success_total{finished_reason=abort}"] == 2
        assert asker.whole(prompt="third", max_tokens=2).usage["completion_tokens"] == 2
