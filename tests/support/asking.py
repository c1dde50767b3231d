"""Asking a server over HTTP, with the rules of its protocol checked in every reply."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.text.byte_tokenizer import END_OF_SEQUENCE, ByteTokenizer
from tests.support.server import MODEL

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# Nothing is measured by it: a test that gets here has failed, and must not hang.
PATIENCE_S = 60.0


@dataclass(slots=True)
class Choice:
    """One choice of a reply. `token_ids`: read from its log-probabilities; without those there are none."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    """A whole reply, streamed or not."""

    reply_id: str
    choices: list[Choice]
    usage: dict[str, Any] | None

    @property
    def choice(self) -> Choice:
        """The only one."""
        [choice] = self.choices
        return choice

    @property
    def cached_tokens(self) -> int:
        assert self.usage is not None
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])


class Asker:
    """A client of one server. Greedy and without end of sequence, unless a request says otherwise."""

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, headers=headers, timeout=PATIENCE_S, trust_env=False)

    def __enter__(self) -> Asker:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def whole(self, path: str = COMPLETIONS, **fields: Any) -> Answer:
        reply = self.http.post(path, json=body(**fields))
        assert reply.status_code == 200, reply.text
        return whole_answer(reply.json())

    def streamed(self, path: str = COMPLETIONS, **fields: Any) -> Answer:
        """The parts put together; usage is asked for. Raises AssertionError for a stream against the rules."""
        asked = body(**{"stream": True, "stream_options": {"include_usage": True}, **fields})
        with self.http.stream("POST", path, json=asked) as reply:
            assert reply.status_code == 200, reply.read()
            assert reply.headers["content-type"].startswith("text/event-stream")
            return joined(list(events(reply.iter_lines())), asked.get("n", 1))

    def refused(self, path: str = COMPLETIONS, **fields: Any) -> tuple[int, dict[str, Any]]:
        """-> status and error of a request that is not served."""
        reply = self.http.post(path, json=body(**fields))
        assert reply.status_code >= 400, reply.text
        return reply.status_code, error_of(reply)

    def cached_tokens(self, prompt: Any, **fields: Any) -> int:
        """How much of the prompt is cached now; it is afterwards."""
        return self.whole(prompt=prompt, max_tokens=1, **fields).cached_tokens

    def metrics(self) -> dict[str, float]:
        """Samples by name, with labels in braces where there are any; those of histograms' buckets are left out."""
        text = self.http.get("/metrics").raise_for_status().text
        return {
            name
            + ("{" + ",".join(f"{key}={value}" for key, value in sorted(labels.items())) + "}" if labels else ""): v
            for family in text_string_to_metric_families(text)
            for name, labels, v, *_ in family.samples
            if not name.endswith("_bucket")
        }

    def info(self) -> dict[str, Any]:
        reply: dict[str, Any] = self.http.get("/server_info").raise_for_status().json()
        return reply

    def wait_until_idle(self) -> None:
        """Until no request is served, and no page is held but by the cache."""

        def idle() -> bool:
            info, metrics = self.info(), self.metrics()
            held = metrics["tpukv:num_used_tokens"] - metrics["tpukv:num_evictable_tokens"]
            return info["num_requests"] == info["num_running"] == info["num_waiting"] == held == 0

        wait_until(idle)


def body(**fields: Any) -> dict[str, Any]:
    """A request's body. Fields that are None are left out."""
    asked = {"model": MODEL, "temperature": 0, "ignore_eos": True, **fields}
    return {name: value for name, value in asked.items() if value is not None}


def wait_until(condition: Callable[[], bool]) -> None:
    """Look again until it holds; not getting there is a failure."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.01)


def events(lines: Iterator[str]) -> Iterator[str]:
    """The data of each event; every event is one line of data and one empty line."""
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            yield line.removeprefix("data: ")


def error_of(reply: httpx.Response) -> dict[str, Any]:
    """The error in OpenAI's shape, and nothing else."""
    found = reply.json()
    assert found.keys() == {"error"}, found
    error: dict[str, Any] = found["error"]
    assert error.keys() == {"message", "type", "param", "code"}, error
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


def whole_answer(reply: dict[str, Any]) -> Answer:
    choices = [_choice(each) for each in reply["choices"]]
    assert [each["index"] for each in reply["choices"]] == list(range(len(choices)))
    assert all(choice.finish_reason in ("stop", "length", "abort") for choice in choices)
    _check_usage(reply["usage"])
    return Answer(reply_id=reply["id"], choices=choices, usage=reply["usage"])


def joined(received: list[str], num_choices: int) -> Answer:
    """Events put together. One [DONE], last; one finish_reason a choice, and nothing of that choice after it."""
    assert received.count("[DONE]") == 1, received
    assert received[-1] == "[DONE]"
    chunks = [json.loads(each) for each in received[:-1]]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    choices = [Choice() for _ in range(num_choices)]
    usage = None
    for chunk in chunks:
        assert usage is None, "something came after the usage"
        usage = chunk.get("usage")
        assert bool(chunk["choices"]) == (usage is None)
        for each in chunk["choices"]:
            choice, gained = choices[each["index"]], _choice(each)
            assert choice.finish_reason is None, "something came after the end of a choice"
            choice.text += gained.text
            choice.token_ids += gained.token_ids
            choice.logprobs += gained.logprobs
            choice.finish_reason = gained.finish_reason
    assert all(choice.finish_reason is not None for choice in choices), received
    if usage is not None:
        _check_usage(usage)
    return Answer(reply_id=chunks[0]["id"], choices=choices, usage=usage)


def tokens_of(text: str) -> list[int]:
    return [int(token) for token in ByteTokenizer().encode(text)]


def text_of(token_ids: Sequence[int]) -> str:
    return bytes(token for token in token_ids if token < END_OF_SEQUENCE).decode("utf-8", "replace")


def _with_labels(name: str, labels: dict[str, str]) -> str:
    return f"{name}{{{','.join(f'{key}={value}' for key, value in sorted(labels.items()))}}}" if labels else name


def _check_usage(usage: dict[str, Any]) -> None:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert 0 <= cached <= usage["prompt_tokens"] - 1
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def _choice(given: dict[str, Any]) -> Choice:
    message = given.get("message") or given.get("delta") or {}
    choice = Choice(text=given.get("text", message.get("content") or ""), finish_reason=given["finish_reason"])
    logprobs = given.get("logprobs") or {}
    if "tokens" in logprobs:  # of a completion
        choice.token_ids = [_token_id(token) for token in logprobs["tokens"]]
        choice.logprobs = list(logprobs["token_logprobs"])
        assert len(logprobs["top_logprobs"]) == len(logprobs["text_offset"]) == len(choice.token_ids)
    elif logprobs.get("content"):
        choice.token_ids = [(each["bytes"] or [END_OF_SEQUENCE])[0] for each in logprobs["content"]]
        choice.logprobs = [each["logprob"] for each in logprobs["content"]]
    assert len(choice.logprobs) == len(choice.token_ids)
    return choice


def _token_id(token: str) -> int:
    """Of a token of the byte tokenizer, as completions spell it."""
    if token.startswith("bytes:\\x"):
        return int(token.removeprefix("bytes:\\x"), 16)
    return ord(token) if token else END_OF_SEQUENCE
