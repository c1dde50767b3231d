"""OpenAI's own client, unmodified, is served: what it asks and reads is what the fake model says."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Iterator

import numpy as np
import openai
import pytest

from tests.support.asking import text_of, tokens_of
from tests.support.engine import cold_logits, cold_tokens
from tests.support.server import MODEL, RunningServer, running_server

PROMPT = "It was a dark and stormy night"
MESSAGES = [{"role": "user", "content": "Who goes there?"}]
CHAT_PROMPT = "user: Who goes there?\nassistant: "  # by the template of the fake tokenizer
GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}
A, B = "97", "98"  # token ids of two letters, as logit_bias has them


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def twin(prompt: str, count: int) -> list[int]:
    return cold_tokens(np.array(tokens_of(prompt), np.int32), count)


def whole_characters(token_ids: list[int]) -> str:
    """The text that is certain, whatever comes behind it."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(token_ids))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def test_a_completion_is_answered_whole(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, **GREEDY)

    assert reply.id.startswith("cmpl-")
    assert (reply.object, reply.model) == ("text_completion", MODEL)
    assert reply.choices[0].text == text_of(twin(PROMPT, 12))
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (30, 12, 42)


@pytest.mark.parametrize("wants_usage", [True, False])
def test_a_completion_is_answered_as_a_stream(client: openai.OpenAI, wants_usage: bool) -> None:
    with client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": wants_usage},
        **GREEDY,
    ) as stream:
        chunks = list(stream)

    with_choices = [chunk for chunk in chunks if chunk.choices]
    assert "".join(chunk.choices[0].text for chunk in with_choices) == text_of(twin(PROMPT, 12))
    assert [chunk.choices[0].finish_reason for chunk in with_choices] == [None] * (len(with_choices) - 1) + ["length"]
    assert [chunk.usage for chunk in with_choices] == [None] * len(with_choices)
    usages = [chunk.usage.total_tokens for chunk in chunks if not chunk.choices]
    assert usages == ([42] if wants_usage else [])


def test_a_conversation_is_answered_whole(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9, **GREEDY)

    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == text_of(twin(CHAT_PROMPT, 9))
    assert reply.choices[0].finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(CHAT_PROMPT), 9)


def test_a_conversation_is_answered_as_a_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=9, stream=True, stream_options={"include_usage": True}, **GREEDY
    ) as stream:
        chunks = list(stream)

    *with_choices, about_usage = chunks
    assert with_choices[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in with_choices[1:]] == [None] * (len(with_choices) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_choices) == text_of(twin(CHAT_PROMPT, 9))
    assert [chunk.choices[0].finish_reason for chunk in with_choices] == [None] * (len(with_choices) - 1) + ["length"]
    assert about_usage.choices == []
    assert about_usage.usage.completion_tokens == 9


def test_the_async_client_is_served_many_requests_at_once(server: RunningServer) -> None:
    # given: more than run together
    prompts = [f"{PROMPT}, and {number} owls" for number in range(8)]

    async def ask() -> tuple[list[str], list[str], list[str]]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def whole(prompt: str) -> str:
                reply = await client.completions.create(model=MODEL, prompt=prompt, max_tokens=10, **GREEDY)
                return reply.choices[0].text

            async def streamed(prompt: str) -> str:
                async with await client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=10, stream=True, **GREEDY
                ) as stream:
                    return "".join([chunk.choices[0].text async for chunk in stream])

            async def chat(prompt: str) -> str:
                messages = [{"role": "user", "content": prompt}]
                reply = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=10, **GREEDY)
                return reply.choices[0].message.content

            waves = [asyncio.gather(*map(one, prompts)) for one in (whole, streamed, chat)]
            return tuple(await asyncio.gather(*waves))

    # when
    whole, streamed, chat = asyncio.run(ask())

    # then
    assert whole == streamed == [text_of(twin(prompt, 10)) for prompt in prompts]
    assert chat == [text_of(twin(f"user: {prompt}\nassistant: ", 10)) for prompt in prompts]


def test_two_choices_differ_and_each_is_that_of_its_own_seed(client: openai.OpenAI) -> None:
    def ask(**fields: object) -> list[str]:
        reply = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=8, temperature=1, extra_body={"ignore_eos": True}, **fields
        )
        assert [choice.index for choice in reply.choices] == list(range(len(reply.choices)))
        assert reply.usage.prompt_tokens == len(PROMPT)
        assert reply.usage.completion_tokens == 8 * len(reply.choices)
        return [choice.text for choice in reply.choices]

    first, second = ask(n=2, seed=11)

    assert first != second
    assert [first, second] == ask(seed=11) + ask(seed=12)


def test_two_choices_are_streamed_side_by_side(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8, "temperature": 1, "seed": 3, "n": 2}
    whole = client.chat.completions.create(extra_body={"ignore_eos": True}, **fields)
    with client.chat.completions.create(stream=True, extra_body={"ignore_eos": True}, **fields) as stream:
        chunks = list(stream)

    for index in (0, 1):
        mine = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(choice.delta.content or "" for choice in mine) == whole.choices[index].message.content
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["length"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("as_list", [True, False])
def test_a_stop_string_ends_the_answer_before_itself(client: openai.OpenAI, as_list: bool, stream: bool) -> None:
    # given: two characters out of the midst of the answer
    text = text_of(twin(PROMPT, 24))
    stop = text[6:8]
    asked = [stop, "never said"] if as_list else stop

    # when
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=24, stop=asked, stream=stream, **GREEDY)
    choices = [chunk.choices[0] for chunk in reply] if stream else reply.choices

    # then
    assert "".join(choice.text for choice in choices) == text[: text.index(stop)]
    assert choices[-1].finish_reason == "stop"


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_a_completion_are_those_of_the_model(client: openai.OpenAI, stream: bool) -> None:
    # given
    expected = twin(PROMPT, 6)
    known = np.array(tokens_of(PROMPT) + expected, np.int32)

    # when
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, logprobs=3, stream=stream, **GREEDY)
    parts = [chunk.choices[0].logprobs for chunk in reply] if stream else [reply.choices[0].logprobs]

    # then
    logprobs = [value for part in parts for value in part.token_logprobs]
    tops = [top for part in parts for top in part.top_logprobs]
    assert len(logprobs) == len(tops) == sum(len(part.tokens) for part in parts) == 6
    for index, token in enumerate(expected):
        said = log_softmax(cold_logits(known[: len(PROMPT) + index]))
        assert logprobs[index] == pytest.approx(said[token], abs=1e-4)
        assert sorted(tops[index].values(), reverse=True) == pytest.approx(np.sort(said)[::-1][:3], abs=1e-4)
    offsets = [offset for part in parts for offset in part.text_offset]
    assert offsets == [len(whole_characters(expected[:index])) for index in range(6)]


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_of_a_conversation_spell_the_answer(client: openai.OpenAI, stream: bool) -> None:
    # given
    expected = twin(CHAT_PROMPT, 6)
    known = np.array(tokens_of(CHAT_PROMPT) + expected, np.int32)

    # when
    reply = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, logprobs=True, top_logprobs=2, stream=stream, **GREEDY
    )
    chosen = [chunk.choices[0] for chunk in reply] if stream else [reply.choices[0]]
    content = [token for choice in chosen if choice.logprobs for token in choice.logprobs.content]

    # then
    assert [each.bytes for each in content] == [[token] for token in expected]
    for index, each in enumerate(content):
        said = log_softmax(cold_logits(known[: len(CHAT_PROMPT) + index]))
        assert each.logprob == pytest.approx(said[expected[index]], abs=1e-4)
        assert [top.logprob for top in each.top_logprobs] == pytest.approx(np.sort(said)[::-1][:2], abs=1e-4)


def test_without_being_asked_no_logprobs_are_told(client: openai.OpenAI) -> None:
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2, **GREEDY)
    chat = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2, **GREEDY)

    assert reply.choices[0].logprobs is None
    assert chat.choices[0].logprobs is None


def test_a_seed_makes_an_answer_repeatable(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str:
        reply = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=16, seed=seed, temperature=1, extra_body={"ignore_eos": True}
        )
        return reply.choices[0].message.content

    assert ask(7) == ask(7) != ask(8)


def test_a_bias_forces_and_forbids_tokens(client: openai.OpenAI) -> None:
    first = twin(PROMPT, 1)[0]
    second = int(np.argsort(cold_logits(np.array(tokens_of(PROMPT), np.int32)))[-2])

    forced = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5, logit_bias={A: 100}, **GREEDY)
    forbidden = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1, logprobs=0, logit_bias={str(first): -100}, **GREEDY
    )

    assert forced.choices[0].text == "aaaaa"
    assert forbidden.choices[0].text == text_of([second])


@pytest.mark.parametrize(
    "penalties",
    [{"frequency_penalty": 2.0}, {"presence_penalty": 2.0}, {"frequency_penalty": -2.0, "presence_penalty": 0.5}],
    ids=str,
)
def test_penalties_change_what_is_repeated(client: openai.OpenAI, penalties: dict[str, float]) -> None:
    """Four letters compete, so that the penalties matter."""
    # given
    letters = [97, 98, 99, 100]
    bias = {str(letter): 100 for letter in letters}

    def reference(frequency: float, presence: float) -> str:
        known, said = tokens_of(PROMPT), []
        for _ in range(30):
            logits = cold_logits(np.array(known + said, np.int32))
            best = max(
                letters,
                key=lambda letter: logits[letter] - frequency * said.count(letter) - presence * (letter in said),
            )
            said.append(best)
        return text_of(said)

    expected = reference(penalties.get("frequency_penalty", 0.0), penalties.get("presence_penalty", 0.0))
    assert expected != reference(0.0, 0.0)

    # when
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=30, logit_bias=bias, **penalties, **GREEDY)

    # then
    assert reply.choices[0].text == expected


def test_both_names_of_the_token_limit_are_taken(client: openai.OpenAI) -> None:
    old = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, **GREEDY)
    new = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=5, **GREEDY)

    assert old.usage.completion_tokens == new.usage.completion_tokens == 5
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5, max_completion_tokens=6, **GREEDY)
    assert refused.value.param == "max_completion_tokens"


def test_a_second_turn_finds_the_first_one_cached(client: openai.OpenAI) -> None:
    # given: an answer that is plain text, so that it comes back as the same tokens
    question = {"role": "user", "content": "Say something that no other test asks for"}
    first = client.chat.completions.create(
        model=MODEL, messages=[question], max_tokens=7, logit_bias={B: 100}, **GREEDY
    )
    assert first.choices[0].message.content == "bbbbbbb"

    # when
    conversation = [question, first.choices[0].message, {"role": "user", "content": "Again"}]
    second = client.chat.completions.create(model=MODEL, messages=conversation, max_tokens=2, **GREEDY)

    # then: every whole page but for the last token's, which was not computed
    computed = first.usage.prompt_tokens + first.usage.completion_tokens - 1
    assert second.usage.prompt_tokens_details.cached_tokens == computed // 4 * 4


def test_the_model_is_listed_and_found(client: openai.OpenAI) -> None:
    [listed] = client.models.list()

    assert listed.id == MODEL
    assert client.models.retrieve(MODEL) == listed
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-4")
    assert refused.value.code == "model_not_found"
