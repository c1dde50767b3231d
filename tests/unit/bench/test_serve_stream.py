"""A streamed reply is the same wherever the network cuts it, and what is wrong with it is told by kind."""

from __future__ import annotations

import json

import pytest

from app.bench.serve.client import StreamedReply
from app.bench.serve.sse import EventSplitter, EventTooLongError

ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None}
END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}], "usage": None}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 70, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 48}},
}


def delta(text: str) -> dict:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}], "usage": None}


def stream(*events: dict | bytes, line_end: bytes = b"\n") -> bytes:
    data = [one if isinstance(one, bytes) else json.dumps(one, ensure_ascii=False).encode() for one in events]
    return b"".join(b"data: " + one + 2 * line_end for one in data)


def read(*parts: bytes) -> StreamedReply:
    reply = StreamedReply()
    for moment, part in enumerate(parts):
        reply.feed(part, float(moment))
    reply.close()
    return reply


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_reply_is_the_same_wherever_it_is_cut(line_end: bytes) -> None:
    # given text with a character that other line readers split at
    whole = stream(ROLE, delta("a\u2028b"), delta("ü\x85"), END, USAGE, b"[DONE]", line_end=line_end)
    whole = b": still there" + 2 * line_end + whole

    # when it comes in two parts, cut anywhere
    for cut in range(len(whole) + 1):
        reply = read(whole[:cut], whole[cut:])

        # then
        assert reply.failure is None
        assert reply.text == "a\u2028bü\x85"
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (70, 2)
        assert reply.usage.prompt_tokens_details.cached_tokens == 48
        assert reply.finish_reason == "length"
        assert len(reply.deltas) == 2


def test_the_role_and_empty_texts_are_no_first_token() -> None:
    # when
    reply = read(stream(ROLE), stream(delta("")), stream(delta("a")), stream(delta("b"), END), stream(USAGE, b"[DONE]"))

    # then
    assert reply.deltas == [2.0, 3.0]


def test_texts_of_completions_are_read_as_well() -> None:
    # when
    event = {"choices": [{"index": 0, "text": "hello", "finish_reason": "length", "logprobs": None}]}
    reply = read(stream(event, USAGE, b"[DONE]"))

    # then
    assert (reply.text, reply.deltas, reply.failure) == ("hello", [0.0], None)


@pytest.mark.parametrize(
    ("sent", "kind", "message"),
    [
        (stream(delta("a")), "connection lost", "before [DONE]"),
        (stream(delta("a")) + b'data: {"ch', "connection lost", "in the middle of an event"),
        (b"", "connection lost", "before [DONE]"),
        (stream(b"{no json"), "malformed", "'{no json'"),
        (stream(b'{"choices": 3}'), "malformed", "choices"),
        (stream(b'{"choices": [{"text": "\xff"}]}'), "malformed", "cannot be read"),
        (stream({"error": {"message": "the device failed", "code": 500}}), "error event", "the device failed"),
        (stream({"choices": [{"finish_reason": "abort"}]}, USAGE, b"[DONE]"), "aborted", "aborted"),
        (stream(delta("a"), USAGE, b"[DONE]"), "malformed", "without a finish_reason"),
        (stream(delta("a"), END, b"[DONE]"), "no usage", "no usage"),
    ],
)
def test_what_is_wrong_with_a_reply_is_told_by_kind(sent: bytes, kind: str, message: str) -> None:
    # when
    failure = read(sent).failure

    # then
    assert failure is not None
    assert failure.kind == kind
    assert message in failure.message


def test_an_error_after_some_text_keeps_the_text_and_its_times() -> None:
    # when
    reply = read(stream(delta("a")), stream({"error": {"message": "no pages"}}))

    # then
    assert (reply.text, reply.deltas) == ("a", [0.0])
    assert reply.failure.message == "no pages"


def test_an_event_of_several_data_lines_is_one() -> None:
    assert list(EventSplitter().feed(b'event: x\ndata: {"a":\ndata: 1}\nid: 7\n\n')) == [b'{"a":\n1}']


def test_a_stream_without_line_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.bench.serve.sse._MOST_BYTES", 100)
    splitter = EventSplitter()
    assert list(splitter.feed(b"x" * 100)) == []
    with pytest.raises(EventTooLongError):
        list(splitter.feed(b"x"))
    assert read(b"y" * 101).failure.kind == "malformed"
