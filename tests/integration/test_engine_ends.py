"""How a request ends: by length, by tokens, by text; and that every length there is can be served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from app.errors import RequestError
from app.text.byte_tokenizer import END_OF_SEQUENCE
from tests.support.engine import CONTEXT_LENGTH, Engine, cold_tokens

OpenEngine = Callable[..., Engine]
PROMPT = np.arange(40, 52, dtype=np.int32)

MODES: dict[str, dict[str, Any]] = {
    "overlap": {},
    "one at a time": {"disable_overlap": True},
    "no prefix reuse": {"cache_type": "chunk_cache"},
    "chunked": {"chunked_prefill_size": 5},
}


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < END_OF_SEQUENCE).decode("utf-8", "replace")


def prompt_before_eos(length: int = 3, at: int = 2) -> np.ndarray:
    """A prompt whose answer has the end-of-sequence token at index `at`."""
    for seed in range(100_000):
        prompt = np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)
        tokens = cold_tokens(prompt, at + 1)
        if tokens[at] == END_OF_SEQUENCE and END_OF_SEQUENCE not in tokens[:at]:
            return prompt
    raise AssertionError("none found")


@pytest.fixture(scope="module")
def ending_prompt() -> np.ndarray:
    return prompt_before_eos()


# -- length -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "full hit"])
def test_no_tokens_and_one_token_are_what_they_say(engine: OpenEngine, mode: str, warm: bool) -> None:
    """H34: 0 answers empty without a step; 1 is exactly one token, though that one also ends the request."""
    opened = engine(**MODES[mode])
    if warm:
        opened.serve(PROMPT, max_tokens=3)
    first = cold_tokens(PROMPT, 1)

    nothing = opened.add(PROMPT, max_tokens=0)
    assert opened.scheduler.num_waiting == opened.scheduler.num_running == 0
    opened.step()
    one = opened.serve(PROMPT, max_tokens=1)
    stopped = opened.serve(PROMPT, max_tokens=1, stop_token_ids=tuple(first))

    empty = opened.outputs[nothing]
    assert (empty.token_ids, empty.text, empty.finish_reason, empty.cached_tokens) == ([], "", "length", 0)
    assert empty.first_token_ns is None
    assert (one.token_ids, one.finish_reason) == (first, "length")
    assert (stopped.token_ids, stopped.finish_reason, stopped.text) == (first, "stop", "")


def test_no_tokens_are_answered_while_others_run(engine: OpenEngine) -> None:
    """H34"""
    opened = engine()
    opened.add(PROMPT, "long", max_tokens=6)
    opened.step(2)

    opened.add(PROMPT, "empty", max_tokens=0)

    assert [output.request_id for output in opened.step()] == ["empty"]
    opened.drain()
    opened.check_replies()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", ["one", "under", "page", "over", "whole"])
def test_every_prompt_length_is_served(engine: OpenEngine, page_size: int, chunk: str) -> None:
    """H31: chunk sizes 1, P - 1, P, P + 1 and off; prompts of 1 to context - 1; each end."""
    size = {"one": 1, "under": max(1, page_size - 1), "page": page_size, "over": page_size + 1, "whole": -1}[chunk]
    opened = engine(page_size=page_size, chunked_prefill_size=size, max_total_tokens=256, check_invariants=False)
    around = {1, 2, page_size, page_size + 1, 31, 32, 33, CONTEXT_LENGTH - 2, CONTEXT_LENGTH - 1}
    for length in sorted(around):
        prompt = np.random.default_rng(length).integers(0, 256, length).astype(np.int32)
        third = cold_tokens(prompt, 3)[2]
        opened.add(prompt, max_tokens=3)
        opened.add(prompt, max_tokens=200, stop_token_ids=(third,))

    opened.drain()

    opened.check_replies()


@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
def test_a_pool_of_one_context_serves_every_length(engine: OpenEngine, cache_type: str) -> None:
    """H31: the smallest pool that the settings let through holds one longest request, and not a token more."""
    opened = engine(page_size=16, max_total_tokens=CONTEXT_LENGTH, cache_type=cache_type, chunked_prefill_size=32)
    for length in (CONTEXT_LENGTH - 1, 1, 64, CONTEXT_LENGTH - 1, 100):
        opened.add(np.random.default_rng(length).integers(0, 256, length), max_tokens=CONTEXT_LENGTH)

    opened.drain()

    opened.check_replies()


@pytest.mark.parametrize(
    ("prompt", "field", "numbers"),
    [
        (range(CONTEXT_LENGTH), "prompt", ["128 tokens", "at most 127", "context length"]),
        (range(0), "prompt", ["0 tokens", "at least one"]),
        ([1, 257, 2], "prompt_token_ids", ["257", "0 to 256"]),
        ([1, -1, 2], "prompt_token_ids", ["-1", "0 to 256"]),
    ],
)
def test_a_prompt_that_can_never_be_served_is_refused_at_entry(
    engine: OpenEngine, prompt: Any, field: str, numbers: list[str]
) -> None:
    """Point 8: naming the field and the numbers; nothing of it is left."""
    opened = engine()

    with pytest.raises(RequestError) as refusal:
        opened.add(prompt, max_tokens=1)

    assert refusal.value.field == field
    assert all(number in str(refusal.value) for number in numbers)
    assert not opened.scheduler.has_work()


def test_a_prompt_that_the_pool_cannot_hold_is_refused_at_entry(engine: OpenEngine) -> None:
    """The context is cut to the pool, and the prompt must leave room for one token."""
    opened = engine(max_total_tokens=40)

    with pytest.raises(RequestError, match="at most 39"):
        opened.add(range(40), max_tokens=1)

    assert len(opened.serve(range(39), max_tokens=9).token_ids) == 1


def test_prompts_of_another_shape_or_type_are_refused(engine: OpenEngine) -> None:
    from app.scheduling.request import Request

    opened = engine()
    for tokens in (np.arange(4), np.arange(4, dtype=np.int32).reshape(2, 2), np.arange(4, dtype=np.float32)):
        with pytest.raises(RequestError, match="int32"):
            opened.scheduler.add(Request(request_id="x", prompt_token_ids=tokens))
    assert not opened.scheduler.has_work()


def test_a_client_may_change_its_array_after_adding(engine: OpenEngine) -> None:
    """H08: also for a request that is retracted and computed again from its tokens."""
    from app.core.sampling import SamplingParams
    from app.scheduling.request import Request

    opened = engine(max_total_tokens=48)
    prompts = [np.full(12, index, np.int32) for index in range(3)]
    for index, prompt in enumerate(prompts):
        opened.add(prompt, f"twin{index}", max_tokens=18)
        opened.scheduler.add(
            Request(
                request_id=f"mine{index}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=18, ignore_eos=True),
            )
        )
    opened.step()

    for prompt in prompts:
        prompt[:] = 99
    outputs = opened.drain()

    assert opened.scheduler.num_retractions
    for index in range(3):
        assert outputs[f"mine{index}"].token_ids == outputs[f"twin{index}"].token_ids
        assert outputs[f"mine{index}"].token_ids == cold_tokens(np.full(12, index, np.int32), 18)


# -- tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_eos_ends_a_request_unless_it_is_ignored(engine: OpenEngine, mode: str, ending_prompt: np.ndarray) -> None:
    opened = engine(**MODES[mode])

    ended = opened.serve(ending_prompt, max_tokens=6, ignore_eos=False)
    ignored = opened.serve(ending_prompt, max_tokens=6)

    tokens = cold_tokens(ending_prompt, 6)
    assert (ended.token_ids, ended.finish_reason) == (tokens[:3], "stop")
    assert ended.text == text_of(tokens[:2])
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_id_ends_a_request_and_has_no_text(engine: OpenEngine, mode: str) -> None:
    opened = engine(**MODES[mode])
    tokens = cold_tokens(PROMPT, 8)

    output = opened.serve(PROMPT, max_tokens=8, stop_token_ids=(tokens[4], 9999))

    assert (output.token_ids, output.finish_reason) == (tokens[:5], "stop")
    assert output.text == text_of(tokens[:4])


def test_a_stop_id_has_no_text_beside_stop_strings_either(engine: OpenEngine) -> None:
    opened = engine()
    tokens = cold_tokens(PROMPT, 8)

    output = opened.serve(PROMPT, max_tokens=8, stop_token_ids=(tokens[4],), stop=("never seen",))

    assert (output.token_ids, output.finish_reason) == (tokens[:5], "stop")
    assert output.text == text_of(tokens[:4])


@pytest.mark.parametrize("min_tokens", [0, 3, 4, 5, 8])
def test_no_stop_takes_effect_before_min_tokens(engine: OpenEngine, min_tokens: int) -> None:
    opened = engine()
    tokens = cold_tokens(PROMPT, 8)
    first, second = tokens[2], tokens[4]

    output = opened.serve(PROMPT, max_tokens=8, min_tokens=min_tokens, stop_token_ids=(first, second))

    length = 3 if min_tokens <= 3 else 5 if min_tokens <= 5 else 8
    assert output.token_ids == tokens[:length]
    assert output.finish_reason == ("length" if length == 8 else "stop")


# -- text ---------------------------------------------------------------------------------------------------------


def prompt_with_ascii_answer(length: int) -> tuple[np.ndarray, list[int]]:
    """A prompt whose answer begins with `length` bytes of printable text."""
    for seed in range(200_000):
        prompt = np.random.default_rng(seed).integers(0, 256, 3).astype(np.int32)
        tokens = cold_tokens(prompt, length)
        if all(32 <= token < 127 for token in tokens):
            return prompt, cold_tokens(prompt, length + 6)
    raise AssertionError("none found")


@pytest.fixture(scope="module")
def ascii_answer() -> tuple[np.ndarray, list[int]]:
    return prompt_with_ascii_answer(6)


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_across_tokens_ends_a_request(engine: OpenEngine, mode: str, ascii_answer: Any) -> None:
    prompt, tokens = ascii_answer
    opened = engine(**MODES[mode])
    text = text_of(tokens[:6])

    output = opened.serve(prompt, max_tokens=12, stop=(text[2:5],))

    assert (output.token_ids, output.finish_reason) == (tokens[:5], "stop")
    assert output.text == text[:2]
    opened.check_idle()


def test_half_a_stop_string_is_text(engine: OpenEngine, ascii_answer: Any) -> None:
    """What was held back because it could have become a stop string is shown when the request ends."""
    prompt, tokens = ascii_answer
    text = text_of(tokens[:6])

    output = engine().serve(prompt, max_tokens=6, stop=(text[4:] + "!?",))

    assert output.text == text
    assert output.finish_reason == "length"


def test_a_stop_string_before_min_tokens_is_text(engine: OpenEngine, ascii_answer: Any) -> None:
    prompt, tokens = ascii_answer
    text = text_of(tokens[:6])

    output = engine().serve(prompt, max_tokens=6, min_tokens=4, stop=(text[1:3],))

    assert output.token_ids == tokens[:6]
    assert output.text == text


def test_text_is_the_decoding_of_all_tokens(engine: OpenEngine) -> None:
    opened = engine()
    tokens = cold_tokens(PROMPT, 20)

    plain = opened.serve(PROMPT, max_tokens=20)
    watched = opened.serve(PROMPT, max_tokens=20, stop=("never seen",))

    assert plain.text == watched.text == text_of(tokens)


def test_a_retracted_request_keeps_its_text(engine: OpenEngine) -> None:
    """Tokens are taken into the watched text once, in order, whatever happens in between."""
    opened = engine(max_total_tokens=48, cache_type="chunk_cache")
    for index in range(3):
        opened.add([index] * 12, max_tokens=20, stop=("never seen",))

    outputs = opened.drain()

    assert opened.scheduler.num_retractions
    for index in range(3):
        assert outputs[f"r{index}"].text == text_of(cold_tokens(np.full(12, index, np.int32), 20))
