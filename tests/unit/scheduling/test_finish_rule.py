"""When a request ends by its tokens, and what its reply says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.core.sampling import SamplingParams
from app.scheduling.finish import FinishRule
from app.scheduling.request import Request, Sequence
from app.text.byte_tokenizer import END_OF_SEQUENCE, ByteDetokenizer

A, B, C = (ord(letter) for letter in "ABC")


@pytest.fixture
def rule() -> FinishRule:
    return FinishRule(eos_token_ids=(END_OF_SEQUENCE, B), detokenizer=ByteDetokenizer())


def sequence_of(**sampling: Any) -> Sequence:
    params = SamplingParams(**sampling)
    return Sequence(Request(request_id="r", prompt_token_ids=np.arange(3, dtype=np.int32), sampling=params), params, 0)


def push(rule: FinishRule, sequence: Sequence, *tokens: int) -> str | None:
    """Take tokens one at a time, as a scheduler does. -> the reason at the last one."""
    reason = None
    for token in tokens:
        assert reason is None, "the sequence had ended"
        sequence.output.append(token)
        reason = rule.reason(sequence)
    return reason


def test_may_end_marks_every_eos_and_nothing_else(rule: FinishRule) -> None:
    tokens = np.array([A, END_OF_SEQUENCE, C, B], np.int32)

    assert rule.may_end(tokens).tolist() == [False, True, False, True]
    assert rule.may_end(tokens[:0]).size == 0


@pytest.mark.parametrize("eos", [END_OF_SEQUENCE, B])
def test_each_eos_stops_and_has_no_text(rule: FinishRule, eos: int) -> None:
    sequence = sequence_of()

    assert push(rule, sequence, A, eos) == "stop"

    output = rule.output(sequence, "stop", None)
    assert (output.text, output.token_ids, output.prompt_tokens) == ("A", [A, eos], 3)


def test_an_ignored_eos_is_text(rule: FinishRule) -> None:
    sequence = sequence_of(ignore_eos=True)

    assert push(rule, sequence, A, B) is None
    assert rule.output(sequence, "length", None).text == "AB"


def test_an_ignored_eos_may_still_be_a_stop_id(rule: FinishRule) -> None:
    assert push(rule, sequence_of(ignore_eos=True, stop_token_ids=(B,)), A, B) == "stop"


def test_a_stop_string_is_found_across_tokens_and_left_out(rule: FinishRule) -> None:
    sequence = sequence_of(stop=("ACA",), ignore_eos=True)

    assert push(rule, sequence, C, A, C, A) == "stop"
    assert rule.output(sequence, "stop", None).text == "C"


def test_a_stop_token_that_would_complete_a_stop_string_has_no_text(rule: FinishRule) -> None:
    """The token ends the request; what was held back for the stop string is text."""
    sequence = sequence_of(stop=("AC",), stop_token_ids=(C,))

    assert push(rule, sequence, A, C) == "stop"
    assert rule.output(sequence, "stop", None).text == "A"


def test_nothing_stops_before_min_tokens(rule: FinishRule) -> None:
    sequence = sequence_of(min_tokens=3, stop=("A",), stop_token_ids=(C,))

    assert push(rule, sequence, A, B) is None
    assert push(rule, sequence, C) == "stop"
    assert rule.output(sequence, "stop", None).text == "AB"


def test_half_a_character_is_shown_once_at_the_end(rule: FinishRule) -> None:
    """H35: trailing partial bytes are flushed as one replacement character."""
    for stop in ((), ("never",)):
        sequence = sequence_of(stop=stop)
        push(rule, sequence, A, 0xE2, 0x82)

        assert rule.output(sequence, "length", None).text == "A\ufffd"


def test_log_probabilities_are_told_to_those_who_asked(rule: FinishRule) -> None:
    asked, not_asked = sequence_of(logprobs=0), sequence_of()

    assert rule.output(asked, "length", None).logprobs == []
    assert rule.output(not_asked, "length", None).logprobs is None
    assert rule.output(not_asked, "capacity", "too big").error == "too big"
