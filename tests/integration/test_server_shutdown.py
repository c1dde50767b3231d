"""The end of a server: who runs may finish, who cannot is told so, nobody is left without an answer."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.asking import COMPLETIONS, Answer, Asker, body, error_of, text_of, wait_until
from tests.support.engine import cold_tokens
from tests.support.paced_model import HeldRunner, SlowRunner, model_runner
from tests.support.server import running_server

PROMPT = [1, 2, 3, 4, 5]
SLOW: dict[str, Any] = {"context_length": 2048, "max_total_tokens": 4096, "page_size": 16, "max_running_requests": 2}


def running(asker: Asker, count: int) -> Callable[[], bool]:
    return lambda: asker.info()["num_running"] == count


def both_ways(pool: ThreadPoolExecutor, asker: Asker, **fields: Any) -> list[Future[Answer]]:
    return [pool.submit(way, prompt=PROMPT, **fields) for way in (asker.whole, asker.streamed)]


def is_closing(asker: Asker) -> bool:
    return asker.http.get("/health").status_code == 503


def test_running_requests_finish_and_new_ones_are_refused() -> None:
    model = HeldRunner()
    with running_server(http={"shutdown_timeout": 60.0}, overrides=model_runner(model)) as server:
        with Asker(server.url) as asker, ThreadPoolExecutor(4) as pool:
            # given
            model.hold()
            answers = both_ways(pool, asker, max_tokens=20)
            wait_until(lambda: asker.info()["num_requests"] == 2)

            # when
            server.ask_to_stop()
            wait_until(lambda: is_closing(asker))

            # then
            for asked in ({}, {"stream": True}, {"prompt": -1}):
                reply = asker.http.post(COMPLETIONS, json=body(**{"prompt": "late", **asked}))
                assert (reply.status_code, error_of(reply)["code"]) == (503, "shutting_down")
                assert int(reply.headers["retry-after"]) > 0
            for path in ("/health", "/health_generate"):
                assert error_of(asker.http.get(path))["code"] == "shutting_down"
            model.release()
            expected = text_of(cold_tokens(np.array(PROMPT, np.int32), 20))
            for answer in answers:
                assert (answer.result().choice.text, answer.result().choice.finish_reason) == (expected, "length")
        assert server.stop() == 0


@pytest.mark.parametrize("asks", [1, 2], ids=["out of time", "asked twice"])
def test_who_cannot_finish_is_ended_with_a_reply(asks: int) -> None:
    """Running requests keep what they have; those that were not started get an error."""
    timeout = 0.3 if asks == 1 else 10_000.0
    with running_server(
        http={"shutdown_timeout": timeout}, overrides=model_runner(SlowRunner(0.003)), **SLOW
    ) as server:
        with Asker(server.url) as asker, ThreadPoolExecutor(8) as pool:
            # given: two run, two wait
            started = both_ways(pool, asker, max_tokens=1900)
            wait_until(running(asker, 2))
            refused = pool.submit(asker.refused, prompt=PROMPT)
            stream = pool.submit(read_stream, asker)
            wait_until(lambda: asker.info()["num_requests"] == 4)

            # when
            for _ in range(asks):
                server.ask_to_stop()

            # then
            for answer in started:
                assert answer.result().choice.finish_reason == "abort"
                assert 0 < answer.result().usage["completion_tokens"] < 1900
            status, error = refused.result()
            assert (status, error["code"]) == (503, "shutting_down")
            assert '"code":"shutting_down"' in stream.result()
            assert stream.result().endswith("data: [DONE]\n\n")
        assert server.stop() == 0


def test_with_no_time_at_all_everybody_is_answered() -> None:
    with running_server(http={"shutdown_timeout": 0.0}, overrides=model_runner(SlowRunner(0.003)), **SLOW) as server:
        with Asker(server.url) as asker, ThreadPoolExecutor(4) as pool:
            started = both_ways(pool, asker, max_tokens=1900)
            wait_until(running(asker, 2))
            server.ask_to_stop()
            assert {answer.result().choice.finish_reason for answer in started} == {"abort"}
        assert server.stop() == 0


def test_an_idle_server_ends_though_clients_keep_connections_open() -> None:
    with running_server() as server, Asker(server.url) as asker:
        assert asker.http.get("/health").status_code == 200  # its connection is kept

        assert server.stop() == 0

        with pytest.raises(httpx.TransportError):
            asker.http.get("/health")


def test_a_client_that_reads_nothing_does_not_keep_a_server_from_ending() -> None:
    with running_server(overrides=model_runner(SlowRunner(0.001)), **SLOW) as server:
        with Asker(server.url) as asker:
            with asker.http.stream("POST", COMPLETIONS, json=body(prompt=PROMPT, max_tokens=1900, stream=True)):
                wait_until(running(asker, 1))
                server.ask_to_stop()
                server.ask_to_stop()
                assert server.stop() == 0


def read_stream(asker: Asker) -> str:
    return asker.http.post(COMPLETIONS, json=body(prompt=PROMPT, max_tokens=5, stream=True)).text
