"""How much is taken: bodies by size, time and type, requests by their number and their wait; and in which order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import structlog

from tests.support.asking import CHAT, COMPLETIONS, Asker, body, error_of, wait_until
from tests.support.paced_model import HeldRunner, model_runner
from tests.support.raw_http import JSON, connect, head, read_reply
from tests.support.server import RunningServer, running_server

MAX_BODY = 4096


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(http={"max_body_bytes": MAX_BODY, "body_timeout": 0.5}) as running:
        yield running


@pytest.fixture(scope="module")
def asker(server: RunningServer) -> Iterator[Asker]:
    with Asker(server.url) as made:
        yield made


def padded(size: int) -> bytes:
    """A request of that many bytes."""
    content = json.dumps(body(prompt="x", max_tokens=1)).encode()
    return content + b" " * (size - len(content))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/abort_request", "/flush_cache"])
def test_a_body_that_says_it_is_too_large_is_refused_unread(server: RunningServer, path: str) -> None:
    with connect(server.url) as connection:
        connection.sendall(head(path, {**JSON, "content-length": "999999999", "connection": "close"}))
        status, reply = read_reply(connection)

    assert status == 413
    assert b'"code":"request_too_large"' in reply


def test_a_body_of_unknown_size_is_read_up_to_the_limit(asker: Asker) -> None:
    def pieces(size: int) -> Iterator[bytes]:
        content = padded(size)
        for begin in range(0, size, 1000):
            yield content[begin : begin + 1000]

    fits = asker.http.post(COMPLETIONS, content=pieces(MAX_BODY), headers=JSON)
    refused = asker.http.post(COMPLETIONS, content=pieces(MAX_BODY + 1), headers=JSON)

    assert "content-length" not in fits.request.headers
    assert fits.status_code == 200
    assert (refused.status_code, error_of(refused)["code"]) == (413, "request_too_large")


def test_a_body_of_just_the_limit_is_taken(asker: Asker) -> None:
    assert asker.http.post(COMPLETIONS, content=padded(MAX_BODY), headers=JSON).status_code == 200
    assert asker.http.post(COMPLETIONS, content=padded(MAX_BODY + 1), headers=JSON).status_code == 413


@pytest.mark.parametrize("sent", [b"", b'{"model": '], ids=["nothing", "half"])
def test_a_body_that_does_not_come_is_waited_for_no_longer(server: RunningServer, sent: bytes) -> None:
    with connect(server.url) as connection:
        connection.sendall(head(COMPLETIONS, {**JSON, "content-length": "100", "connection": "close"}) + sent)
        status, reply = read_reply(connection)

    assert status == 408
    assert b'"code":"request_timeout"' in reply


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/jsonx", ""])
def test_a_body_of_another_type_is_refused(asker: Asker, content_type: str) -> None:
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize", "/abort_request", "/flush_cache"):
        reply = asker.http.post(path, content=padded(100), headers={"content-type": content_type})
        assert (reply.status_code, error_of(reply)["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_taken_however_its_type_is_spelt(asker: Asker, content_type: str) -> None:
    reply = asker.http.post(COMPLETIONS, content=padded(100), headers={"content-type": content_type})
    assert reply.status_code == 200


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": "fake"', b"{}{}"], ids=repr)
def test_a_body_that_is_no_json_object_is_refused(asker: Asker, content: bytes) -> None:
    reply = asker.http.post(COMPLETIONS, content=content, headers=JSON)
    assert (reply.status_code, error_of(reply)["type"]) == (400, "invalid_request_error")


def test_fields_that_nobody_defines_are_ignored_aloud() -> None:
    """In a header of the reply and in one line of the log; streams, too."""
    with running_server() as server, Asker(server.url) as asker, structlog.testing.capture_logs() as logs:
        for stream in (False, True):
            logs.clear()
            reply = asker.http.post(
                COMPLETIONS, json=body(prompt="x", max_tokens=1, stream=stream, zeta=1, alpha={"b": 2})
            )
            assert reply.status_code == 200
            assert reply.headers["x-ignored-fields"] == "alpha, zeta"
            [line] = [each for each in logs if each["event"] == "fields_ignored"]
            assert line["fields"] == ("alpha", "zeta")
        logs.clear()
        plain = asker.http.post(COMPLETIONS, json=body(prompt="x", max_tokens=1))
        assert "x-ignored-fields" not in plain.headers
        assert not [each for each in logs if each["event"] == "fields_ignored"]


@contextmanager
def one_at_a_time(max_queued_requests: int) -> Iterator[tuple[HeldRunner, Asker]]:
    """A server that runs one request, held at its first step, and takes so many more."""
    model = HeldRunner()
    http = {"max_queued_requests": max_queued_requests}
    with running_server(http=http, max_running_requests=1, overrides=model_runner(model)) as server:
        model.hold()
        try:
            with Asker(server.url) as asker:
                yield model, asker
        finally:
            model.release()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_queued", [0, 1, 3])
def test_more_requests_than_may_wait_are_told_to_come_back(max_queued: int, stream: bool) -> None:
    with one_at_a_time(max_queued) as (model, asker), ThreadPoolExecutor(4) as pool:
        # given
        taken = [pool.submit(asker.whole, prompt=f"p{number}", max_tokens=2) for number in range(1 + max_queued)]
        wait_until(lambda: asker.info()["num_requests"] == 1 + max_queued)

        # when
        reply = asker.http.post(COMPLETIONS, json=body(prompt="late", stream=stream))

        # then
        assert (reply.status_code, error_of(reply)["code"]) == (429, "queue_full")
        assert int(reply.headers["retry-after"]) > 0
        assert str(max_queued) in error_of(reply)["message"]
        model.release()
        assert [each.result().usage["completion_tokens"] for each in taken] == [2] * (1 + max_queued)
        asker.wait_until_idle()
        assert asker.whole(prompt="late", max_tokens=1).usage["completion_tokens"] == 1


def test_choices_are_taken_together_or_not_at_all() -> None:
    with one_at_a_time(2) as (model, asker):
        status, error = asker.refused(prompt="x", n=4)
        assert (status, error["param"]) == (400, "n")  # it never fits: trying again would not help
        assert asker.info()["num_requests"] == 0
        model.release()
        assert len(asker.whole(prompt="x", n=3, max_tokens=1).choices) == 3


def test_what_waits_too_long_is_refused_and_what_runs_goes_on() -> None:
    model = HeldRunner()
    http = {"queue_timeout": 0.5}
    with running_server(http=http, max_running_requests=1, overrides=model_runner(model)) as server:
        with Asker(server.url) as asker, ThreadPoolExecutor(3) as pool:
            # given
            model.hold()
            running = pool.submit(asker.whole, prompt="first", max_tokens=5)
            model.wait_until_stuck()
            waiting = pool.submit(asker.refused, prompt="second", max_tokens=5)
            wait_until(lambda: asker.info()["num_requests"] == 2)

            # when: it has waited longer than it may by the time the engine looks
            time.sleep(0.6)
            model.release()

            # then
            assert running.result().usage["completion_tokens"] == 5
            status, error = waiting.result()
            assert (status, error["code"]) == (503, "queue_timeout")
            assert asker.metrics()["tpukv:requests_refused_total{code=queue_timeout}"] >= 1


def test_a_lower_priority_is_served_earlier() -> None:
    """By the log, where one thread writes in the order of ending."""
    with one_at_a_time(8) as (model, asker), ThreadPoolExecutor(4) as pool:
        # given: prompts of different lengths, the first of which runs before another is there
        asked = {"a": 9, "late": 5, "middle": 0, "early": -5}
        for number, (prompt, priority) in enumerate(asked.items(), start=1):
            pool.submit(asker.whole, prompt=prompt, max_tokens=3, priority=priority)
            wait_until(lambda wanted=number: asker.info()["num_requests"] == wanted)
            model.wait_until_stuck()

        # when
        with structlog.testing.capture_logs() as logs:
            model.release()
            asker.wait_until_idle()
            pool.shutdown()

        # then
        lengths = [each["prompt_tokens"] for each in logs if each["event"] == "request_finished"]
        assert lengths == [len("a"), len("early"), len("middle"), len("late")]
