from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.server.openai_errors import device_failure
from app.server.parts import Part, Usage
from app.server.rendering.base import Renderer
from app.server.rendering.chat import ChatRenderer
from app.server.rendering.completions import CompletionRenderer
from app.server.rendering.events import DONE
from app.text.byte_tokenizer import ByteDetokenizer

USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
USAGE_BODY = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}
VOCABULARY = {0: b"Hi", 1: b" there", 2: b"\xe3\x81", 3: b"\x82!", 4: b"", 5: b"Hi", 6: "日本".encode()}


def spelling(token_id: int) -> bytes:
    return VOCABULARY[token_id]


def completions(*, include_usage: bool = False, token_bytes: Callable[[int], bytes] = spelling) -> CompletionRenderer:
    return CompletionRenderer(
        request_id="cmpl-1", model="smol", created=1700000000, include_usage=include_usage, token_bytes=token_bytes
    )


def chat(*, include_usage: bool = False, token_bytes: Callable[[int], bytes] = spelling) -> ChatRenderer:
    return ChatRenderer(
        request_id="chatcmpl-1", model="smol", created=1700000000, include_usage=include_usage, token_bytes=token_bytes
    )


def events_of(raw: bytes) -> list[Any]:
    """The bodies of whole server-sent events."""
    lines = raw.decode().split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def stream_of(renderer: Renderer, parts: list[Part], num_choices: int) -> list[Any]:
    return events_of(renderer.opening(num_choices) + b"".join(map(renderer.chunk, parts)))


def test_a_completion_has_openais_form() -> None:
    part = Part(index=0, text="Hi there", token_ids=[0, 1, 4], finish_reason="stop")

    assert json.loads(completions().response([part], USAGE)) == {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1700000000,
        "model": "smol",
        "choices": [{"index": 0, "text": "Hi there", "logprobs": None, "finish_reason": "stop"}],
        "usage": USAGE_BODY,
    }


def test_a_chat_completion_has_openais_form() -> None:
    part = Part(index=0, text="Hi there", token_ids=[0, 1, 4], finish_reason="length")

    assert json.loads(chat().response([part], USAGE)) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1700000000,
        "model": "smol",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi there", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": USAGE_BODY,
    }


@pytest.mark.parametrize("renderer", [completions, chat])
def test_choices_are_in_the_clients_order(renderer: Callable[[], Renderer]) -> None:
    parts = [Part(index=index, text=str(index), token_ids=[], finish_reason="abort") for index in (2, 0, 1)]

    choices = json.loads(renderer().response(parts, USAGE))["choices"]

    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in choices} == {"abort"}


@pytest.mark.parametrize("renderer", [completions, chat])
def test_where_cached_tokens_came_from_is_told_when_known(renderer: Callable[[], Renderer]) -> None:
    usage = Usage(prompt_tokens=7, completion_tokens=0, cached_tokens=4, cached_by_source={"device": 3, "host": 1})
    details = {"cached_tokens": 4, "cached_tokens_details": {"device": 3, "host": 1, "storage": 0}}

    assert json.loads(renderer().response([], usage))["usage"]["prompt_tokens_details"] == details
    assert events_of(renderer().usage_chunk(usage))[0]["usage"]["prompt_tokens_details"] == details


def test_a_completion_stream_has_openais_form() -> None:
    parts = [
        Part(index=0, text="Hi", token_ids=[0]),
        Part(index=0, text=" there", token_ids=[1], finish_reason="stop"),
    ]
    frame = {"id": "cmpl-1", "object": "text_completion", "created": 1700000000, "model": "smol"}

    assert completions().opening(3) == b""
    assert stream_of(completions(), parts, 1) == [
        {**frame, "choices": [{"index": 0, "text": "Hi", "logprobs": None, "finish_reason": None}]},
        {**frame, "choices": [{"index": 0, "text": " there", "logprobs": None, "finish_reason": "stop"}]},
    ]


def test_a_chat_stream_has_openais_form() -> None:
    parts = [
        Part(index=1, text="Hi", token_ids=[0]),
        Part(index=1, text=" there", token_ids=[1], finish_reason="stop"),
        Part(index=0, text="", token_ids=[4], finish_reason="length"),
    ]

    events = stream_of(chat(), parts, 2)

    frame = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1700000000, "model": "smol"}
    assert all({name: event[name] for name in frame} == frame and "usage" not in event for event in events)
    assert [event["choices"] for event in events] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 1, "delta": {"content": "Hi"}, "logprobs": None, "finish_reason": None}],
        [{"index": 1, "delta": {"content": " there"}, "logprobs": None, "finish_reason": None}],
        [{"index": 1, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}],
    ]


@pytest.mark.parametrize("renderer", [completions, chat])
def test_with_usage_asked_for_only_the_last_event_has_one(renderer: Callable[..., Renderer]) -> None:
    told = renderer(include_usage=True)
    part = Part(index=0, text="Hi", token_ids=[0], finish_reason="stop")

    events = stream_of(told, [part], 1)
    last = events_of(told.usage_chunk(USAGE))

    assert events
    assert all("usage" in event and event["usage"] is None for event in events)
    assert last == [{**events[0], "choices": [], "usage": USAGE_BODY}]


@pytest.mark.parametrize("renderer", [completions, chat])
def test_a_part_without_news_makes_no_event(renderer: Callable[[], Renderer]) -> None:
    assert renderer().chunk(Part(index=0, text="", token_ids=[])) == b""
    assert renderer().chunk(Part(index=0, text="", token_ids=[], logprobs=[], top_logprobs=[])) == b""


@pytest.mark.parametrize("renderer", [completions, chat])
def test_a_token_without_text_is_an_event(renderer: Callable[[], Renderer]) -> None:
    assert len(events_of(renderer().chunk(Part(index=0, text="", token_ids=[2])))) == 1


@pytest.mark.parametrize("renderer", [completions, chat])
def test_an_error_in_a_stream_is_an_event_with_the_error_body(renderer: Callable[[], Renderer]) -> None:
    error = device_failure()

    assert events_of(renderer().error(error)) == [json.loads(error.body())]
    assert DONE == b"data: [DONE]\n\n"


LOGGED = Part(
    index=0,
    text="Hi there",
    token_ids=[0, 1],
    logprobs=[-0.5, -math.inf],
    top_logprobs=[[(0, -0.5), (1, -1.5)], [(6, -0.1), (2, -math.inf)]],
    finish_reason="stop",
)


def test_log_probabilities_of_a_completion_have_openais_form() -> None:
    choice = json.loads(completions().response([LOGGED], USAGE))["choices"][0]

    assert choice["logprobs"] == {
        "tokens": ["Hi", " there"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [
            {"Hi": -0.5, " there": -1.5},
            {"日本": -0.1, "bytes:\\xe3\\x81": -9999.0, " there": -9999.0},  # the chosen one is always there
        ],
        "text_offset": [0, 2],
    }


def test_log_probabilities_of_a_chat_have_openais_form() -> None:
    choice = json.loads(chat().response([LOGGED], USAGE))["choices"][0]

    assert choice["logprobs"] == {
        "content": [
            {
                "token": "Hi",
                "logprob": -0.5,
                "bytes": [72, 105],
                "top_logprobs": [
                    {"token": "Hi", "logprob": -0.5, "bytes": [72, 105]},
                    {"token": " there", "logprob": -1.5, "bytes": list(b" there")},
                ],
            },
            {
                "token": " there",
                "logprob": -9999.0,
                "bytes": list(b" there"),
                "top_logprobs": [
                    {"token": "日本", "logprob": -0.1, "bytes": list("日本".encode())},
                    {"token": "\\xe3\\x81", "logprob": -9999.0, "bytes": [0xE3, 0x81]},
                ],
            },
        ],
        "refusal": None,
    }


@pytest.mark.parametrize("top_logprobs", [None, [[]]])
def test_without_other_tokens_asked_for_only_the_chosen_one_is_told(top_logprobs: Any) -> None:
    part = Part(index=0, text="Hi", token_ids=[0], logprobs=[-0.5], top_logprobs=top_logprobs)

    completion = events_of(completions().chunk(part))[0]["choices"][0]["logprobs"]
    content = events_of(chat().chunk(part))[0]["choices"][0]["logprobs"]["content"]

    assert completion["top_logprobs"] == [{"Hi": -0.5}]
    assert content == [{"token": "Hi", "logprob": -0.5, "bytes": [72, 105], "top_logprobs": []}]


def test_of_two_tokens_with_one_text_the_likelier_is_told() -> None:
    part = Part(index=0, text="Hi", token_ids=[5], logprobs=[-3.0], top_logprobs=[[(0, -0.5), (5, -3.0)]])

    logprobs = events_of(completions().chunk(part))[0]["choices"][0]["logprobs"]

    assert logprobs["top_logprobs"] == [{"Hi": -0.5}]
    assert logprobs["token_logprobs"] == [-3.0]


def test_the_last_log_probability_of_a_chat_stream_comes_before_the_end() -> None:
    part = Part(index=0, text="", token_ids=[4], logprobs=[-0.5], top_logprobs=[[]], finish_reason="stop")

    gained, ended = events_of(chat().chunk(part))

    assert gained["choices"][0]["delta"] == {"content": ""}
    assert [entry["logprob"] for entry in gained["choices"][0]["logprobs"]["content"]] == [-0.5]
    assert (gained["choices"][0]["finish_reason"], ended["choices"][0]["finish_reason"]) == (None, "stop")
    assert ended["choices"][0]["logprobs"] is None


def test_a_character_over_two_tokens_begins_with_the_first() -> None:
    part = Part(index=0, text="Hiあ!Hi", token_ids=[0, 2, 3, 0], logprobs=[0.0] * 4)

    logprobs = events_of(completions().chunk(part))[0]["choices"][0]["logprobs"]
    content = events_of(chat().chunk(part))[0]["choices"][0]["logprobs"]["content"]

    assert logprobs["text_offset"] == [0, 2, 2, 4]
    assert logprobs["tokens"] == ["Hi", "bytes:\\xe3\\x81", "bytes:\\x82!", "Hi"]
    assert [entry["bytes"] for entry in content[1:3]] == [[0xE3, 0x81], [0x82, 0x21]]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == part.text


def test_offsets_of_different_choices_do_not_mix() -> None:
    renderer = completions()
    parts = [
        Part(index=0, text="Hi", token_ids=[0], logprobs=[0.0]),
        Part(index=1, text=" there", token_ids=[1], logprobs=[0.0]),
        Part(index=0, text="Hi", token_ids=[0], logprobs=[0.0]),
        Part(index=1, text="Hi", token_ids=[0], logprobs=[0.0]),
    ]

    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in stream_of(renderer, parts, 2)]

    assert offsets == [[0], [0], [2], [6]]


# A stream says the same as the whole reply, however it is cut.


def spelt(token_id: int) -> bytes:
    return bytes([token_id])


@st.composite
def cut_answers(draw: st.DrawFn) -> tuple[list[Part], Part]:
    """The parts of a streamed answer of one-byte tokens, and the same answer in one part."""
    pieces = draw(st.lists(st.sampled_from(["a", "é", "日", "😀", "\n", '"']) | st.just("\u2028"), max_size=6))
    token_ids = list("".join(pieces).encode()) + draw(st.sampled_from([[], [0xE3], [0xF0, 0x9F], [0xFF]]))
    size = draw(st.integers(1, 4))
    stream = ByteDetokenizer().stream()
    logprobs = [-float(index) for index in range(len(token_ids))]
    tops = [[(token_id, -0.5), (65, -1.0)] for token_id in token_ids]
    parts = [
        Part(
            index=0,
            text=stream.push(token_ids[start : start + size]),
            token_ids=token_ids[start : start + size],
            logprobs=logprobs[start : start + size],
            top_logprobs=tops[start : start + size],
        )
        for start in range(0, len(token_ids), size)
    ]
    end = Part(index=0, text=stream.flush(), token_ids=[], logprobs=[], top_logprobs=[], finish_reason="length")
    text = "".join(part.text for part in [*parts, end])
    whole = Part(index=0, text=text, token_ids=token_ids, logprobs=logprobs, top_logprobs=tops, finish_reason="length")
    return [*parts, end], whole


@settings(deadline=None, max_examples=100)
@given(cut_answers())
def test_a_completion_stream_adds_up_to_the_whole_reply(answer: tuple[list[Part], Part]) -> None:
    parts, whole = answer

    expected = json.loads(completions(token_bytes=spelt).response([whole], USAGE))["choices"][0]
    choices = [event["choices"][0] for event in stream_of(completions(token_bytes=spelt), parts, 1)]

    assert "".join(choice["text"] for choice in choices) == expected["text"]
    for name, values in expected["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][name]] == values
    assert [choice["finish_reason"] for choice in choices[-1:]] == ["length"]
    text = expected["text"]
    starts = dict(zip(expected["logprobs"]["text_offset"], expected["logprobs"]["tokens"], strict=True))
    plain = {offset: token for offset, token in starts.items() if not token.startswith("bytes:")}
    assert {offset: text[offset] for offset in plain} == plain


@settings(deadline=None, max_examples=100)
@given(cut_answers())
def test_a_chat_stream_adds_up_to_the_whole_reply(answer: tuple[list[Part], Part]) -> None:
    parts, whole = answer

    expected = json.loads(chat(token_bytes=spelt).response([whole], USAGE))["choices"][0]
    choices = [event["choices"][0] for event in stream_of(chat(token_bytes=spelt), parts, 1)]

    assert "".join(choice["delta"].get("content", "") for choice in choices) == expected["message"]["content"]
    told = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert told == expected["logprobs"]["content"]
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "length")
    assert bytes(byte for entry in told for byte in entry["bytes"]) == bytes(whole.token_ids)
