"""The text of a stream is that of the whole reply, whatever the tokens: half characters, marks, stop strings."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest

from app.text.byte_tokenizer import END_OF_SEQUENCE
from tests.support.asking import CHAT, COMPLETIONS, Asker, text_of, tokens_of
from tests.support.engine import cold_tokens
from tests.support.paced_model import ScriptedRunner, model_runner
from tests.support.server import running_server

PROMPT = [1, 2, 3]
CHAT_PROMPT = "user: x\nassistant: "
FAMILY = "👨‍👩‍👧"  # three emoji and two joiners: five characters, eighteen bytes
SAID = f"naïve café e\u0301 {FAMILY} 数 fin"


class Speaker:
    """A server that says what a test wants to hear."""

    def __init__(self, asker: Asker, model: ScriptedRunner) -> None:
        self._asker = asker
        self._model = model

    def check(self, tokens: list[int], expected: str, reason: str, **fields: object) -> None:
        """Completion and conversation, whole and as a stream, with log-probabilities and without."""
        chat = {"path": CHAT, "messages": [{"role": "user", "content": "x"}]}
        completion = {"path": COMPLETIONS, "prompt": PROMPT}
        for length, asked in ((len(PROMPT), completion), (len(CHAT_PROMPT), chat)):
            self._model.say(length, tokens)
            logprobs = {"logprobs": True} if asked is chat else {"logprobs": 0}
            for way in (self._asker.whole, self._asker.streamed):
                for extra in ({}, logprobs):
                    answer = way(**{**asked, "max_tokens": len(tokens), **fields, **extra})
                    assert answer.choice.text == expected
                    assert answer.choice.finish_reason == reason
                    if extra:
                        used = answer.usage["completion_tokens"]
                        assert answer.choice.token_ids == tokens[:used]


@pytest.fixture(scope="module")
def speaker() -> Iterator[Speaker]:
    model = ScriptedRunner()
    with running_server(overrides=model_runner(model)) as server, Asker(server.url) as asker:
        yield Speaker(asker, model)


@pytest.fixture(scope="module")
def random_asker() -> Iterator[Asker]:
    with running_server() as server, Asker(server.url) as asker:
        yield asker


@pytest.mark.parametrize("seed", range(6))
def test_random_bytes_are_the_same_text_streamed_and_whole(random_asker: Asker, seed: int) -> None:
    """Most of them are no UTF-8 at all; stop strings of one character are met in midst of it."""
    draw = random.Random(seed)
    prompt = [draw.randrange(256) for _ in range(10)]
    tokens = cold_tokens(np.array(prompt, np.int32), 80)
    text = text_of(tokens)
    stop = draw.choice(text[20:])

    for fields, expected in (({}, text), ({"stop": stop}, text[: text.index(stop)])):
        answers = [way(prompt=prompt, max_tokens=80, **fields) for way in (random_asker.whole, random_asker.streamed)]
        assert [answer.choice.text for answer in answers] == [expected] * 2


def test_characters_of_several_bytes_arrive_whole(speaker: Speaker) -> None:
    speaker.check(tokens_of(SAID), SAID, "length")


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_half_character_at_the_end_is_one_replacement(speaker: Speaker, cut: int) -> None:
    """As a decoder of all the bytes has it: once, at the very end."""
    speaker.check(tokens_of("end 👋")[:-cut], "end \ufffd", "length")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([0xE2, 0x82, 0x41], "\ufffdA"),
        ([0xF0, 0x9F, 0x91, 0xE2, 0x82, 0xAC], "\ufffd€"),
        ([0xC0, 0x80, 0x41], "\ufffd\ufffdA"),
        ([0x41, END_OF_SEQUENCE, 0x42], "AB"),
        ([0xE2, END_OF_SEQUENCE, 0x82, 0xAC], "€"),
    ],
    ids=str,
)
def test_broken_characters_become_what_a_decoder_makes_of_them(
    speaker: Speaker, tokens: list[int], expected: str
) -> None:
    speaker.check(tokens, expected, "length")


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("café", "naïve "),
        ("é", "naïve caf"),
        ("\u0301", "naïve café e"),
        ("👩", "naïve café e\u0301 👨\u200d"),
        (FAMILY, "naïve café e\u0301 "),
        ("👧 数", f"naïve café e\u0301 {FAMILY[:-1]}"),
        (["数 fi", "not this"], f"naïve café e\u0301 {FAMILY} "),
        (["fin", "n"], ""),
    ],
    ids=str,
)
def test_a_stop_string_across_tokens_and_bytes_is_never_shown(
    speaker: Speaker, stop: str | list[str], expected: str
) -> None:
    speaker.check(tokens_of(SAID), expected, "stop", stop=stop)


@pytest.mark.parametrize(
    ("said", "stop", "expected", "reason"),
    [
        ("aaab", "aab", "a", "stop"),
        ("ab ab abc", "abc", "ab ab ", "stop"),
        ("almost st", "stop", "almost st", "length"),
        ("almost 👋", "👋👋", "almost 👋", "length"),
        ("one two", ["two", "wo"], "one ", "stop"),
        ("xyz", ["z", "xyz"], "", "stop"),
    ],
)
def test_what_might_begin_a_stop_string_is_shown_once_it_is_none(
    speaker: Speaker, said: str, stop: str | list[str], expected: str, reason: str
) -> None:
    speaker.check(tokens_of(said), expected, reason, stop=stop)


def test_a_stop_string_may_hold_the_replacement_of_a_half_character(speaker: Speaker) -> None:
    speaker.check([0x41, 0xE2, 0x42, 0x43], "A", "stop", stop="\ufffdB")


def test_a_special_token_has_no_text_and_ends_what_does_not_ignore_it(speaker: Speaker) -> None:
    tokens = [*tokens_of("hé"), END_OF_SEQUENCE, *tokens_of("unsaid")]
    speaker.check(tokens, "hé", "stop", ignore_eos=False)
    speaker.check(tokens, "héunsaid", "length", skip_special_tokens=True)
    speaker.check(tokens, "héunsaid", "length", skip_special_tokens=False)  # this tokenizer has no text for it
