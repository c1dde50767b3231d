"""What clients do below HTTP, or instead of it; and probes and flushes whose clients are many or gone."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.support.asking import COMPLETIONS, PATIENCE_S, Asker
from tests.support.paced_model import HeldRunner, model_runner
from tests.support.raw_http import connect, head, post, read_reply
from tests.support.server import MODEL, RunningServer, running_server

ASKED = {"model": MODEL, "prompt": [*range(40)], "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.mark.parametrize(
    "sent",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: " + b"y" * 100_000,
    ],
    ids=["words", "TLS", "two lengths", "an endless head"],
)
def test_what_is_no_http_is_refused_in_openais_form(server: RunningServer, sent: bytes) -> None:
    with connect(server.url) as connection:
        connection.sendall(sent)

        status, reply = read_reply(connection)

    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_http")
    assert error["message"]


def test_a_body_that_turns_into_nonsense_is_answered_once_and_is_no_mistake_of_the_server(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    with connect(server.url) as connection:
        fields = {"content-type": "text/plain", "transfer-encoding": "chunked"}
        connection.sendall(head(COMPLETIONS, fields) + b"zz\r\n")  # refused by HTTP, and by the route

        status, reply = read_reply(connection)

    assert (status, reply.count(b"HTTP/1.1 ")) == (400, 1)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("begun", [b"", b"POST /v1/compl"])
@pytest.mark.parametrize("first", [b"", head("/health", {}, "GET")], ids=["at once", "after a request"])
def test_a_connection_on_which_no_request_comes_is_ended(
    monkeypatch: pytest.MonkeyPatch, first: bytes, begun: bytes
) -> None:
    monkeypatch.setattr("app.server.connection.HEAD_TIMEOUT_S", 0.2)
    with running_server() as server, connect(server.url) as connection:
        if first:
            connection.sendall(first)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        connection.sendall(begun)

        while connection.recv(4096):  # it times out on a connection that is left open
            pass


def test_an_answer_that_takes_long_is_no_connection_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.server.connection.HEAD_TIMEOUT_S", 0.05)
    runner = HeldRunner()
    with running_server(overrides=model_runner(runner)) as server, httpx.Client(base_url=server.url) as http:
        with ThreadPoolExecutor(1) as threads:
            runner.hold()
            asked = threads.submit(http.post, COMPLETIONS, json=ASKED, timeout=PATIENCE_S)
            runner.wait_until_stuck()
            time.sleep(0.3)  # several looks
            runner.release()

        assert asked.result().status_code == 200


def test_probes_are_answered_while_the_queue_is_full() -> None:
    runner = HeldRunner()
    limits = {"max_queued_requests": 0}
    with running_server(overrides=model_runner(runner), max_running_requests=1, http=limits) as server:
        with Asker(server.url) as asker, ThreadPoolExecutor(4) as threads:
            runner.hold()
            asked = threads.submit(httpx.post, f"{server.url}{COMPLETIONS}", json=ASKED, timeout=PATIENCE_S)
            runner.wait_until_stuck()
            probes = [threads.submit(httpx.get, f"{server.url}/health_generate", timeout=PATIENCE_S) for _ in range(3)]
            try:
                end = time.monotonic() + PATIENCE_S
                while (waiting := asker.http.get("/server_info").json()["num_requests"]) < 4:
                    assert time.monotonic() < end, f"{waiting} requests, not 4"
                    assert not any(probe.done() for probe in probes), [probe.result().text for probe in probes]
            finally:
                runner.release()

        assert [probe.result().status_code for probe in probes] == [200] * 3
        assert asked.result().status_code == 200


def test_a_flush_that_waits_ends_with_its_client() -> None:
    runner = HeldRunner()
    with running_server(overrides=model_runner(runner)) as server, ThreadPoolExecutor(1) as threads:
        httpx.post(f"{server.url}{COMPLETIONS}", json=ASKED).raise_for_status()
        runner.hold()
        asked = threads.submit(httpx.post, f"{server.url}{COMPLETIONS}", json=ASKED, timeout=PATIENCE_S)
        runner.wait_until_stuck()  # with pages locked that the first one cached

        flush = post(server.url, "/flush_cache", {"timeout": 3600})
        httpx.get(f"{server.url}/health").raise_for_status()
        flush.close()
        httpx.get(f"{server.url}/health").raise_for_status()
        runner.release()

        assert asked.result().status_code == 200
        time.sleep(0.3)  # several tries of one that goes on
        again = httpx.post(f"{server.url}{COMPLETIONS}", json=ASKED).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
