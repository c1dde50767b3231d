"""What an observer of the scheduler is told: deltas that add up to the reply, admissions once, times that add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from dependency_injector import providers

from app.scheduling.observer import StepTimes
from app.scheduling.request import RequestDelta, Sequence
from app.text.byte_tokenizer import ByteTokenizer
from tests.support.engine import Engine, opened

OpenEngine = Callable[..., Engine]


class Recorder:
    """Keeps all that a scheduler tells, in order."""

    def __init__(self) -> None:
        self.admissions: list[tuple[str, int | None]] = []
        self.deltas: list[RequestDelta] = []
        self.times: list[StepTimes] = []

    def admitted(self, sequence: Sequence) -> None:
        self.admissions.append((sequence.request_id, sequence.cached_tokens))

    def streamed(self, delta: RequestDelta) -> None:
        self.deltas.append(delta)

    def stepped(self, times: StepTimes) -> None:
        self.times.append(times)

    def text(self, request_id: str) -> str:
        return "".join(delta.text for delta in self.deltas if delta.request_id == request_id)

    def tokens(self, request_id: str) -> list[int]:
        return [token for delta in self.deltas if delta.request_id == request_id for token in delta.token_ids]


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def watched(recorder: Recorder) -> Iterator[OpenEngine]:
    """Opens one engine that `recorder` watches."""
    contexts = []

    def open_engine(**fields: Any) -> Engine:
        context = opened(overrides={"observer": lambda _: providers.Object(recorder)}, **fields)
        contexts.append(context)
        return context.__enter__()

    yield open_engine
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [3, 16])
def test_deltas_add_up_to_the_reply(watched: OpenEngine, recorder: Recorder, page_size: int, chunk: int) -> None:
    """H35: the fake model answers random bytes, so characters are cut at every place."""
    engine = watched(page_size=page_size, chunked_prefill_size=chunk)
    for index in range(6):
        engine.add(range(index, index + 20), f"s{index}", streams=True, max_tokens=30)
        engine.add(range(index, index + 20), f"w{index}", max_tokens=30)

    outputs = engine.drain()

    for index in range(6):
        streamed, whole = outputs[f"s{index}"], outputs[f"w{index}"]
        assert recorder.tokens(f"s{index}") == streamed.token_ids == whole.token_ids
        decoded = ByteTokenizer().decode(np.array(whole.token_ids, np.int32))
        assert recorder.text(f"s{index}") == streamed.text == whole.text == decoded
    engine.check_replies()


def test_every_token_is_told_in_the_step_that_brings_it(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched(disable_overlap=True)
    engine.add(range(8), "s", streams=True, max_tokens=5)

    told = []
    while engine.scheduler.has_work():
        engine.step()
        told.append(len(recorder.tokens("s")))

    assert told[:5] == [1, 2, 3, 4, 5]


def test_text_that_may_be_part_of_a_stop_string_is_held_back(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched()
    plain = engine.serve(range(8), max_tokens=20)
    stop = plain.text[5:9]
    engine.add(range(8), "s", streams=True, max_tokens=20, stop=(stop,))

    output = engine.drain()["s"]

    assert output.finish_reason == "stop"
    assert recorder.text("s") == output.text == plain.text[: plain.text.index(stop)]
    engine.requests.clear()


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_shortest_streams_end_like_whole_replies(watched: OpenEngine, recorder: Recorder, max_tokens: int) -> None:
    engine = watched()
    engine.add(range(8), "s", streams=True, max_tokens=max_tokens)

    output = engine.drain()["s"]

    assert len(output.token_ids) == max_tokens
    assert (output.finish_reason, output.text) == ("length", recorder.text("s"))
    assert recorder.deltas[-1].request_id == "s"


def test_logprobs_are_told_with_their_tokens(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched()
    engine.add(range(8), "s", streams=True, max_tokens=12, logprobs=2)

    output = engine.drain()["s"]

    assert [one for delta in recorder.deltas for one in delta.logprobs or ()] == output.logprobs
    assert [one for delta in recorder.deltas for one in delta.top_logprobs or ()] == output.top_logprobs


def test_a_retraction_neither_repeats_nor_loses_a_delta(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched(max_total_tokens=64, page_size=4)
    for index in range(3):
        engine.add(range(index, index + 8), f"s{index}", streams=True, max_tokens=30)

    outputs = engine.drain()

    assert engine.scheduler.num_retractions > 0
    for index in range(3):
        assert recorder.tokens(f"s{index}") == outputs[f"s{index}"].token_ids
        assert recorder.text(f"s{index}") == outputs[f"s{index}"].text
    assert sorted(name for name, _ in recorder.admissions) == ["s0", "s1", "s2"]
    engine.check_replies()


def test_an_abort_tells_what_was_there_and_nothing_after(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched()
    engine.add(range(8), "s", streams=True, max_tokens=100)
    engine.step(6)

    engine.scheduler.abort("s")
    output = engine.drain()["s"]

    told = len(recorder.deltas)
    assert output.finish_reason == "abort"
    assert recorder.tokens("s") == output.token_ids
    engine.step(3)
    assert len(recorder.deltas) == told


def test_admissions_name_what_was_cached(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched(page_size=4)
    engine.serve(range(20), request_id="first", max_tokens=1)

    engine.serve(range(20), request_id="second", max_tokens=1)

    assert recorder.admissions == [("first", 0), ("second", 16)]


def test_output_tokens_are_counted_once_each(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched(max_total_tokens=64, page_size=4)
    for index in range(4):
        engine.add(range(index, index + 8), streams=index % 2 == 0, max_tokens=20)

    outputs = engine.drain()

    assert engine.scheduler.num_tokens == sum(len(output.token_ids) for output in outputs.values())


def test_times_of_a_step_are_parts_of_it(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched()
    engine.serve(range(20), max_tokens=4)

    assert recorder.times
    assert all(times.schedule > 0 and times.prepare >= 0 and times.execute >= 0 for times in recorder.times)
    assert any(times.prepare > 0 and times.execute > 0 for times in recorder.times)


def test_lower_priority_numbers_are_admitted_first(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched(max_running_requests=1)
    for name, priority in (("running", 5), ("late", 1), ("plain", 0), ("early", -1), ("early too", -1)):
        engine.add(range(8), name, priority=priority, max_tokens=2)
        if name == "running":
            engine.step()

    engine.drain()

    assert [name for name, _ in recorder.admissions] == ["running", "early", "early too", "plain", "late"]
    engine.check_replies()


def test_the_least_important_request_gives_way_first(watched: OpenEngine, recorder: Recorder) -> None:
    """Two fill the pool; the older one has the higher number, so it is the one that is retracted."""
    engine = watched(max_total_tokens=64, page_size=4, max_running_requests=2)
    engine.add(range(8), "less", priority=1, max_tokens=40)
    engine.add(range(1, 9), "more", priority=0, max_tokens=40)

    ended = []
    while engine.scheduler.has_work():
        ended += [output.request_id for output in engine.step()]

    assert engine.scheduler.num_retractions > 0
    assert ended == ["more", "less"]
    engine.check_replies()


def test_progress_tells_every_request_that_has_not_ended(watched: OpenEngine, recorder: Recorder) -> None:
    engine = watched(max_running_requests=1)
    engine.add(range(8), "running", max_tokens=50)
    engine.add(range(9), "waiting", max_tokens=5)
    engine.step(4)

    running, waiting = engine.scheduler.progress()

    assert (running.request_id, running.status, running.prompt_tokens, running.cached_tokens) == (
        "running",
        "decode",
        8,
        0,
    )
    assert running.output_tokens == 3
    assert (waiting.status, waiting.cached_tokens, waiting.output_tokens) == ("waiting", None, 0)
    engine.scheduler.abort("running")
