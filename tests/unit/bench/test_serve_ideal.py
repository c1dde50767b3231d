"""The ideal hit rate is that of a cache that remembers everything and compares with everything."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from app.bench.serve.ideal import SentTokens, ideal_cached_tokens, settled_tokens


def array(tokens) -> np.ndarray:
    return np.array(tokens, np.int32)


def compared_with_everything(sent: list[tuple[list[int], list[int]]], page_size: int) -> list[int]:
    """The definition, word for word, in O(n^2)."""
    shared = []
    for place, (prompt, _) in enumerate(sent):
        longest = 0
        for _, earlier in sent[:place]:
            length = 0
            while length < min(len(prompt) - 1, len(earlier)) and prompt[length] == earlier[length]:
                length += 1
            longest = max(longest, length)
        shared.append(longest // page_size * page_size)
    return shared


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)
REPLIES = st.lists(st.integers(0, 1), max_size=5)


@settings(deadline=None, max_examples=300)
@given(sent=st.lists(st.tuples(TOKENS, REPLIES), max_size=8), page_size=st.integers(1, 5))
def test_the_ideal_equals_a_comparison_with_every_earlier_request(sent, page_size) -> None:
    # given requests whose replies are known
    pairs = [(prompt, prompt + reply) for prompt, reply in sent]

    # when
    shared = ideal_cached_tokens(
        [SentTokens(prompt=array(prompt), settled=array(settled)) for prompt, settled in pairs], page_size
    )

    # then
    assert shared == compared_with_everything(pairs, page_size)


def test_an_equal_prompt_shares_all_but_the_page_of_its_last_token() -> None:
    # given
    one = SentTokens(prompt=array(range(32)), settled=array(range(32)))

    # then
    assert ideal_cached_tokens([one, one], 16) == [0, 16]
    assert ideal_cached_tokens([one, one], 1) == [0, 31]


def test_a_reply_is_settled_without_its_last_token_where_the_next_prompt_shows_it() -> None:
    # given a prompt of 3 tokens and a reply of 4, of which the next prompt goes on
    prompt, longer = array([1, 2, 3]), array([1, 2, 3, 10, 11, 12, 13, 99])

    # then
    assert settled_tokens(prompt, longer, 4).tolist() == [1, 2, 3, 10, 11, 12]
    assert settled_tokens(prompt, longer, 0).tolist() == [1, 2, 3]
    assert settled_tokens(prompt, None, 4).tolist() == [1, 2, 3]
    assert settled_tokens(prompt, array([1, 2, 4, 10, 11, 12, 13]), 4).tolist() == [1, 2, 3]
