"""Flushing the cache and ending requests, while others are served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.asking import COMPLETIONS, Asker, body, error_of, events, joined, text_of, wait_until
from tests.support.engine import cold_tokens
from tests.support.paced_model import HeldRunner, SlowRunner, model_runner
from tests.support.server import RunningServer, running_server

LONG = 1900  # tokens: several seconds, if nobody ends it
PROMPT = "A prompt of a few pages, which are locked while it is being read."


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    slow = model_runner(SlowRunner(0.003))
    with running_server(context_length=2048, page_size=16, max_total_tokens=8192, overrides=slow) as running:
        yield running


@pytest.fixture
def asker(server: RunningServer) -> Iterator[Asker]:
    with Asker(server.url) as made:
        yield made
        made.wait_until_idle()


class Stream:
    """A stream that is being read: what has come of it, and the rest."""

    def __init__(self, reply: httpx.Response) -> None:
        self._events = events(reply.iter_lines())
        self.received: list[str] = []

    def read(self, count: int) -> None:
        self.received += [next(self._events) for _ in range(count)]

    @property
    def reply_id(self) -> str:
        return str(json.loads(self.received[0])["id"])

    def rest(self, num_choices: int = 1) -> Any:
        self.received += list(self._events)
        return joined(self.received, num_choices)


@contextmanager
def streaming(asker: Asker, **fields: Any) -> Iterator[Stream]:
    """A stream whose first event has come."""
    asked = body(**{"prompt": PROMPT, "max_tokens": LONG, "stream": True, **fields})
    with asker.http.stream("POST", COMPLETIONS, json=asked) as reply:
        stream = Stream(reply)
        stream.read(1)
        yield stream


def abort(asker: Asker, **fields: Any) -> int:
    return int(asker.http.post("/abort_request", json=fields).raise_for_status().json()["aborted"])


def flush(asker: Asker, **fields: Any) -> httpx.Response:
    return asker.http.post("/flush_cache", json=fields)


def test_a_flush_drops_all_that_is_cached(asker: Asker) -> None:
    asker.cached_tokens(PROMPT)
    assert asker.cached_tokens(PROMPT) == (len(PROMPT) - 1) // 16 * 16

    first, second = flush(asker), asker.http.post("/flush_cache")

    assert first.json()["flushed_pages"] >= len(PROMPT) // 16
    assert second.json() == {"flushed_pages": 0}
    assert asker.cached_tokens(PROMPT) == 0


def test_a_flush_is_refused_while_a_request_reads_and_changes_nothing(asker: Asker) -> None:
    # given
    other = "Another prompt of some pages, which nobody reads just now"
    asker.cached_tokens(other)
    with streaming(asker, max_tokens=120) as stream:
        # when
        refused = [flush(asker), flush(asker, timeout=0.05)]

        # then
        for reply in refused:
            assert reply.status_code == 409
            assert error_of(reply)["code"] == "conflict"
        assert stream.rest().choice.text == text_of(cold_tokens(np.frombuffer(PROMPT.encode(), np.uint8), 120))
    assert asker.cached_tokens(other) == (len(other) - 1) // 16 * 16


def test_a_flush_with_a_timeout_waits_for_the_request_to_end(asker: Asker) -> None:
    with ThreadPoolExecutor(1) as pool, streaming(asker) as stream:
        waiting = pool.submit(flush, asker, timeout=60)
        assert flush(asker).status_code == 409
        assert not waiting.done()
        assert abort(asker, rid=stream.reply_id) == 1

        assert waiting.result().json()["flushed_pages"] > 0
    assert asker.cached_tokens(PROMPT) == 0


@pytest.mark.parametrize("fields", [{"timeout": -1}, {"timeout": "long"}, {"timeout": 3601}], ids=str)
def test_a_flush_with_a_bad_timeout_names_it(asker: Asker, fields: dict[str, Any]) -> None:
    reply = flush(asker, **fields)
    assert (reply.status_code, error_of(reply)["param"]) == (400, "timeout")


def test_a_flush_while_a_prompt_is_computed_leaves_its_answer_right() -> None:
    """Asked while the engine is within the first of several chunks."""
    model = HeldRunner()
    prompt = [*range(60)]
    with running_server(overrides=model_runner(model)) as server, Asker(server.url) as asker:
        asker.cached_tokens("something else that is cached")
        model.hold()
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(asker.whole, prompt=prompt, max_tokens=30)
            model.wait_until_stuck()
            flushed = pool.submit(flush, asker)
            model.release()

            assert flushed.result().status_code in (200, 409)
            assert answer.result().choice.text == text_of(cold_tokens(np.array(prompt, np.int32), 30))


def test_aborting_by_id_ends_one_stream_and_no_other(asker: Asker) -> None:
    with streaming(asker) as stream, streaming(asker, max_tokens=150) as other:
        stream.read(3)

        assert abort(asker, rid=stream.reply_id) == 1

        ended = stream.rest()
        assert ended.choice.finish_reason == "abort"
        whole = text_of(cold_tokens(np.frombuffer(PROMPT.encode(), np.uint8), 150))
        # What was held back for the rest of a character is flushed.
        assert whole.startswith(ended.choice.text.rstrip("\ufffd")) or len(ended.choice.text) > len(whole)
        assert other.rest().choice.text == whole
    assert abort(asker, rid=stream.reply_id) == 0


def test_aborting_a_whole_reply_answers_it_with_what_there_is(asker: Asker) -> None:
    with ThreadPoolExecutor(1) as pool:
        before = asker.info()["generated_tokens"]
        answer = pool.submit(asker.whole, prompt=PROMPT, max_tokens=LONG)
        wait_until(lambda: asker.info()["generated_tokens"] > before + 5)

        assert abort(asker, abort_all=True) == 1

        choice = answer.result().choice
        assert choice.finish_reason == "abort"
        assert choice.text
        assert 5 <= answer.result().usage["completion_tokens"] < LONG


def test_aborting_one_choice_leaves_the_others(asker: Asker) -> None:
    with streaming(asker, n=3, temperature=1, seed=1, max_tokens=60) as stream:
        assert abort(asker, rid=f"{stream.reply_id}-1") == 1
        answer = stream.rest(3)

    assert [choice.finish_reason for choice in answer.choices] == ["length", "abort", "length"]


def test_aborting_a_reply_ends_all_its_choices(asker: Asker) -> None:
    with streaming(asker, n=3) as stream:
        assert abort(asker, rid=stream.reply_id) == 3
        assert [choice.finish_reason for choice in stream.rest(3).choices] == ["abort"] * 3


def test_aborting_all_ends_everything(asker: Asker) -> None:
    with streaming(asker) as first, streaming(asker, prompt="another") as second:
        assert abort(asker, abort_all=True) == 2
        assert [each.rest().choice.finish_reason for each in (first, second)] == ["abort"] * 2
    assert abort(asker, abort_all=True) == 0


@pytest.mark.parametrize("rid", ["unknown", "cmpl", "c", "cmpl-", "self"])
def test_aborting_an_unknown_id_ends_nothing(asker: Asker, rid: str) -> None:
    with streaming(asker, max_tokens=40) as stream:
        assert abort(asker, rid=rid) == 0
        assert stream.rest().choice.finish_reason == "length"


@pytest.mark.parametrize("fields", [{}, {"rid": ""}, {"rid": 5}, {"abort_all": "yes"}], ids=str)
def test_an_abort_that_names_nothing_is_refused(asker: Asker, fields: dict[str, Any]) -> None:
    reply = asker.http.post("/abort_request", json=fields)
    assert (reply.status_code, error_of(reply)["param"]) == (400, next(iter(fields), "rid"))
