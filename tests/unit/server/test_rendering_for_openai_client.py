"""The official client's own models read what is rendered."""

from __future__ import annotations

import math

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from app.server.parts import Part, Usage
from app.server.rendering.base import Renderer
from app.server.rendering.chat import ChatRenderer
from app.server.rendering.completions import CompletionRenderer

USAGE = Usage(prompt_tokens=4, completion_tokens=2, cached_tokens=3, cached_by_source={"device": 3})
PLAIN = Part(index=0, text="a", token_ids=[97])
LOGGED = Part(
    index=1,
    text="b\ufffd",
    token_ids=[98, 0xE3],
    logprobs=[-0.5, -math.inf],
    top_logprobs=[[(98, -0.5)], [(99, -1.0)]],
    finish_reason="stop",
)


def spelt(token_id: int) -> bytes:
    return bytes([token_id])


COMPLETIONS = CompletionRenderer(request_id="cmpl-1", model="m", created=1, include_usage=True, token_bytes=spelt)
CHAT = ChatRenderer(request_id="chatcmpl-1", model="m", created=1, include_usage=True, token_bytes=spelt)


@pytest.mark.parametrize(
    ("renderer", "model"), [(COMPLETIONS, Completion), (CHAT, ChatCompletion)], ids=["completion", "chat"]
)
def test_a_whole_reply_is_read(renderer: Renderer, model: type[BaseModel]) -> None:
    finished = Part(index=0, text="a", token_ids=[97], finish_reason="length")

    reply = model.model_validate_json(renderer.response([finished, LOGGED], USAGE), strict=True)

    assert reply.usage.prompt_tokens_details.cached_tokens == 3
    assert [choice.finish_reason for choice in reply.choices] == ["length", "stop"]
    assert reply.choices[1].logprobs is not None


def test_every_event_of_a_chat_stream_is_read() -> None:
    raw = CHAT.opening(2) + CHAT.chunk(PLAIN) + CHAT.chunk(LOGGED) + CHAT.usage_chunk(USAGE)

    events = [ChatCompletionChunk.model_validate_json(line[6:], strict=True) for line in raw.decode().splitlines()[::2]]

    assert [len(event.choices) for event in events] == [1, 1, 1, 1, 1, 0]
    assert [event.usage.total_tokens for event in events if event.usage] == [6]


def test_the_last_events_of_a_completion_stream_are_read() -> None:
    """The earlier ones have no finish_reason, which the client's model wants and OpenAI's streams do not have."""
    raw = COMPLETIONS.chunk(LOGGED) + COMPLETIONS.usage_chunk(USAGE)

    ended, usage = [Completion.model_validate_json(line[6:], strict=True) for line in raw.decode().splitlines()[::2]]

    assert ended.choices[0].finish_reason == "stop"
    assert (ended.usage, usage.usage.total_tokens, usage.choices) == (None, 6, [])
