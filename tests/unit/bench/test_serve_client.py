"""The client against a real server on this machine: bodies, times in order, and every way to fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from app.bench.serve.client import StreamingClient
from app.bench.serve.conversation import Message, Turn
from app.bench.serve.exchange import Exchange
from app.bench.serve.failures import BenchServerError
from app.bench.serve.server_api import ServerApi, open_http
from app.bench.serve.settings import Target
from app.errors import ConfigError
from tests.support.openai_server import MODEL, ScriptedServer, chat_tokens, reply_text, serving

PROMPT = Turn(max_tokens=5, token_ids=np.arange(40, dtype=np.int32))
CHAT = Turn(max_tokens=4, messages=(Message(role="user", content="hi"), Message(role="assistant", content=None)))


def exchange(server: ScriptedServer, *turns: Turn, timeout_s: float = 60.0, salt: str | None = None) -> list[Exchange]:
    async def talk(url: str) -> list[Exchange]:
        async with open_http(Target(url=url)) as http:
            client = StreamingClient(
                http=http, now=time.perf_counter, model=MODEL, timeout_s=timeout_s, cache_salt=salt
            )
            return [await client.send(turn, "well") for turn in turns]

    with serving(server) as url:
        return asyncio.run(talk(url))


def ask(server: ScriptedServer, question: Callable[[ServerApi], Awaitable], **target):
    async def talk(url: str):
        target.setdefault("url", url)
        async with open_http(Target(**target)) as http:
            return await question(ServerApi(http, Target(**target)))

    with serving(server) as url:
        return asyncio.run(talk(url))


def test_a_prompt_of_tokens_is_streamed_with_its_times_and_counts() -> None:
    # given
    server = ScriptedServer()

    # when the same prompt goes twice
    first, second = exchange(server, PROMPT, PROMPT)

    # then
    assert first.failure is None
    assert first.text == reply_text(list(range(40)), 5)
    assert first.sent <= first.first_byte <= first.deltas[0]
    assert list(first.deltas) == sorted(first.deltas)
    assert len(first.deltas) == 5
    assert first.deltas[-1] <= first.end
    assert (first.prompt_tokens, first.completion_tokens, first.cached_tokens) == (40, 5, 0)
    assert second.cached_tokens == 32
    assert server.log[0] == {
        "model": MODEL,
        "prompt": list(range(40)),
        "max_tokens": 5,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_a_chat_sends_the_last_reply_where_its_messages_leave_it_open() -> None:
    # given
    server = ScriptedServer()

    # when
    (reply,) = exchange(server, CHAT, salt="pepper")

    # then
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    assert server.log[0]["messages"] == messages
    assert server.log[0]["cache_salt"] == "pepper"
    assert reply.text == reply_text(chat_tokens(messages), 4)


@pytest.mark.parametrize(
    ("fault", "label", "message"),
    [
        ("503", "refused 503", "the queue is full"),
        ("malformed", "malformed", "no json"),
        ("error event", "error event", "the device failed"),
        ("abort", "aborted", "aborted"),
        ("cut", "connection lost", ""),
        ("early end", "connection lost", "in the middle of an event"),
        ("no usage", "no usage", "no usage"),
    ],
)
def test_a_failure_is_told_by_kind_and_the_next_request_is_served(fault, label, message) -> None:
    # when
    failed, fine = exchange(ScriptedServer(faults={0: fault}), PROMPT, PROMPT)

    # then
    assert failed.failure is not None
    assert failed.failure.label == label
    assert message in failed.failure.message
    assert fine.failure is None


def test_a_request_that_hangs_fails_after_its_timeout() -> None:
    # when
    (hung,) = exchange(ScriptedServer(faults={0: "hang"}), PROMPT, timeout_s=0.2)

    # then
    assert hung.failure.label == "timeout"
    assert "0.2 s" in hung.failure.message
    assert len(hung.deltas) == 2  # what came before is kept


def test_a_server_that_is_not_there_is_no_connection() -> None:
    async def talk() -> tuple[Exchange, bool]:
        target = Target(url="http://127.0.0.1:1")
        async with open_http(target) as http:
            client = StreamingClient(http=http, now=time.perf_counter, model=MODEL, timeout_s=9, cache_salt=None)
            return await client.send(PROMPT, ""), await ServerApi(http, target).answers()

    exchange, answers = asyncio.run(talk())
    assert exchange.failure.label == "no connection"
    assert not answers


class TestServerApi:
    def test_the_server_is_described_from_its_models_and_its_info(self) -> None:
        facts = ask(ScriptedServer(max_model_len=777), ServerApi.describe)
        assert (facts.model, facts.context_length, facts.page_size, facts.cache_type) == (
            MODEL,
            777,
            16,
            "radix_cache",
        )
        assert facts.info["model"] == MODEL

    def test_a_model_that_is_not_served_is_refused_with_those_that_are(self) -> None:
        with pytest.raises(ConfigError, match=f"model='other'.*one of {MODEL}"):
            ask(ScriptedServer(), ServerApi.describe, model="other")

    def test_the_context_length_may_stand_in_the_info_alone(self) -> None:
        server = ScriptedServer(max_model_len=None, info={"context_length": 99})
        assert ask(server, ServerApi.describe).context_length == 99

    @pytest.mark.parametrize(
        ("info", "reason"), [({}, "does not say how long"), ({"page_size": "sixteen"}, "odd.*page_size")]
    )
    def test_a_server_that_does_not_say_what_is_needed_is_refused(self, info, reason) -> None:
        with pytest.raises(BenchServerError, match=reason):
            ask(ScriptedServer(max_model_len=None, info=info), ServerApi.describe)

    def test_the_admin_key_opens_info_and_flush(self) -> None:
        # given
        async def talk(api: ServerApi):
            await api.describe()
            await api.flush()

        server = ScriptedServer(admin_key="secret")

        # then
        ask(server, talk, api_key="other", admin_api_key="secret")
        assert server.log == ["flush"]
        with pytest.raises(BenchServerError, match=r"401.*the admin key.*--admin-api-key"):
            ask(server, talk, api_key="other")

    def test_a_server_that_is_not_there_is_named(self) -> None:
        with pytest.raises(BenchServerError, match=r"http://127\.0\.0\.1:1 could not be asked for /v1/models"):
            ask(ScriptedServer(), ServerApi.describe, url="http://127.0.0.1:1")
