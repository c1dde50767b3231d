"""Requests for a server over the fake model, made from a seed, and what must be answered to each."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from app.core.sampling import SamplingParams
from app.scheduling.request import Request
from app.text.byte_tokenizer import ByteTokenizer
from tests.support.engine import CONTEXT_LENGTH, cold_reply
from tests.support.server import MODEL

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"

_TOKENIZER = ByteTokenizer()
_LETTERS = "etaoin shrdlu"
# Prompts begin alike, up to where each goes its own way, so that cached pages are shared, split and evicted.
_BEGINNINGS = tuple("".join(Random(number).choices(_LETTERS, k=CONTEXT_LENGTH)) for number in range(4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Of each choice of a greedy request. tokens: how many, the one that ended it among them."""

    text: str
    tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that can be served. expected: None of one that is sampled. prompt_tokens: of its prompt, once."""

    path: str
    body: dict[str, Any]
    prompt_tokens: int
    max_tokens: int
    expected: Expected | None

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))

    @property
    def streams(self) -> bool:
        return bool(self.body.get("stream", False))

    @property
    def raw(self) -> bytes:
        return json.dumps(self.body).encode()


@dataclass(slots=True)
class Choice:
    text: str = ""
    finish_reason: str | None = None
    num_logprobs: int = 0


@dataclass(slots=True)
class Answer:
    """A reply, whole or put together from its events."""

    choices: dict[int, Choice] = field(default_factory=lambda: defaultdict(Choice))
    usage: dict[str, Any] | None = None


def ask(
    rng: Random,
    *,
    stream: bool | None = None,
    num_choices: int | None = None,
    max_tokens: int | None = None,
    logprobs: int | None = None,
) -> Asked:
    """A request from `rng`; what is given is so, the rest is drawn."""
    text = rng.choice(_BEGINNINGS)[: rng.choice((0, 8, 30, 60, 100))]
    text += "".join(rng.choices(_LETTERS, k=rng.choice((1, 1, 3, 9, 27))))
    body: dict[str, Any] = {"model": MODEL, "ignore_eos": rng.random() < 0.8}
    path = COMPLETIONS if rng.random() < 0.7 else CHAT
    if path == CHAT:
        text = text[: CONTEXT_LENGTH - 24 - (max_tokens or 0)]
        messages = [{"role": "user", "content": text}]
        prompt = _TOKENIZER.encode(_TOKENIZER.apply_chat_template(messages))
        body["messages"] = messages
    else:
        text = text[: CONTEXT_LENGTH - (max_tokens or 1)]
        prompt = _TOKENIZER.encode(text)
        body["prompt"] = text if rng.random() < 0.5 else prompt.tolist()
    room = CONTEXT_LENGTH - prompt.size
    drawn = room if rng.random() < 0.15 else rng.randint(1, min(room, 24))
    body["max_tokens"] = drawn if max_tokens is None else min(max_tokens, room)
    body["n"] = num_choices or rng.choice((1, 1, 1, 1, 2, 3))
    body["stream"] = rng.random() < 0.5 if stream is None else stream
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if logprobs is None and rng.random() < 0.3:
        logprobs = rng.choice((0, 1, 5))
    if logprobs is not None:
        body |= {"logprobs": logprobs} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": logprobs}
    if rng.random() < 0.2:
        body["cache_salt"] = rng.choice(("", "tenant a", "tenant b"))
    if rng.random() < 0.1:
        body["priority"] = rng.randint(-2, 2)
    greedy = rng.random() < 0.8
    body |= {"temperature": 0} if greedy else {"temperature": 0.8, "seed": rng.randrange(2**31)}
    if rng.random() < 0.2:
        body["stop"] = rng.choice(_LETTERS)
    return Asked(
        path=path,
        body=body,
        prompt_tokens=prompt.size,
        max_tokens=body["max_tokens"],
        expected=_expected(prompt, body) if greedy else None,
    )


def _expected(prompt: np.ndarray, body: dict[str, Any]) -> Expected:
    sampling = SamplingParams(max_tokens=body["max_tokens"], ignore_eos=body["ignore_eos"])
    tokens, reason = cold_reply(Request(request_id="twin", prompt_token_ids=prompt, sampling=sampling))
    stop = body.get("stop")
    if stop is not None and ord(stop) in tokens:
        # An ASCII stop string is one token, and the byte of no other character.
        tokens, reason = tokens[: tokens.index(ord(stop)) + 1], "stop"
    text = _TOKENIZER.decode(np.array(tokens, np.int32))
    return Expected(text=text.removesuffix(stop or ""), tokens=len(tokens), finish_reason=reason)


def read_answer(asked: Asked, raw: bytes) -> Answer:
    """The answer in a complete body. AssertionError for one that is not of OpenAI's form, or that tells an error."""
    answer = Answer()
    for body in events_of(raw) if asked.streams else [json.loads(raw)]:
        assert "error" not in body, body
        for told in body["choices"]:
            choice = answer.choices[told["index"]]
            assert choice.finish_reason is None, f"told after the end of its choice: {told}"
            choice.text += _text_of(told)
            choice.finish_reason = told["finish_reason"]
            if told["logprobs"] is not None:
                choice.num_logprobs += len(told["logprobs"]["content" if asked.path == CHAT else "tokens"])
        answer.usage = body["usage"] or answer.usage
    return answer


def check_answer(asked: Asked, answer: Answer, *, may_be_aborted: bool) -> None:
    """AssertionError unless it is the one right answer. may_be_aborted: whether somebody ends others' requests."""
    assert sorted(answer.choices) == list(range(asked.num_choices)), asked.body
    for choice in answer.choices.values():
        aborted = choice.finish_reason == "abort"
        assert may_be_aborted or not aborted, asked.body
        if asked.expected is None:
            assert choice.finish_reason in ("stop", "length", "abort"), choice
        elif aborted:
            # Half a character at its end is told as what it is not yet.
            assert asked.expected.text.startswith(choice.text.rstrip("\ufffd")), (asked.body, choice)
        else:
            told = (choice.text, choice.finish_reason)
            assert told == (asked.expected.text, asked.expected.finish_reason), (asked.body, choice)
    _check_usage(asked, answer)


def _check_usage(asked: Asked, answer: Answer) -> None:
    usage = answer.usage
    assert usage is not None, asked.body
    assert usage["prompt_tokens"] == asked.prompt_tokens
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < asked.prompt_tokens
    most = asked.num_choices * asked.max_tokens
    if asked.expected is not None and all(choice.finish_reason != "abort" for choice in answer.choices.values()):
        assert usage["completion_tokens"] == asked.num_choices * asked.expected.tokens
    assert 0 <= usage["completion_tokens"] <= most
    if asked.body.get("logprobs") not in (None, False):
        assert sum(choice.num_logprobs for choice in answer.choices.values()) == usage["completion_tokens"]


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The bodies of a stream's events, without the last, which says that it is whole."""
    *events, done, rest = raw.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", ""), raw[-200:]
    assert all(event.startswith("data: ") for event in events), raw[:200]
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _text_of(told: dict[str, Any]) -> str:
    if "text" in told:
        return str(told["text"])
    return str((told.get("message") or told["delta"]).get("content", ""))
