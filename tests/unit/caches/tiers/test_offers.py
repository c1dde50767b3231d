"""What waits to be copied: a prompt and its answer, if both wait, are one copy."""

from __future__ import annotations

import numpy as np
import pytest

from app.caches.tiers.offers import MAX_OFFERS, Offers
from app.caches.tree.node import TreeNode
from app.core.keys import DEFAULT_NAMESPACE, RadixKey
from tests.support.tree_model import key_of

PROMPT, ANSWER = [1, 2], [1, 2, 3]


def node(tokens: list[int], parent: TreeNode | None = None) -> TreeNode:
    """At the end of these tokens, a page each."""
    above = parent or TreeNode.root(DEFAULT_NAMESPACE, 0)
    edge = key_of(tokens[above.end :]).raw
    pages = np.array(tokens[above.end :], np.int32)
    return TreeNode(
        parent=above, namespace=DEFAULT_NAMESPACE, edge=edge, pages=pages, epoch=0, start=above.end, serial=0
    )


def offered(offers: Offers, tokens: list[int], at: TreeNode) -> RadixKey:
    key = key_of(tokens)
    assert offers.add(key, at, np.array(tokens, np.int32))
    return key


def taken(offers: Offers) -> list[list[int]]:
    return [offers.take().key.tokens().tolist() for _ in range(len(offers))]


@pytest.fixture
def offers() -> Offers:
    return Offers(covers_shorter=True)


def test_a_prompt_that_waits_and_its_answer_are_one(offers: Offers) -> None:
    prompt = node(PROMPT)
    offered(offers, PROMPT, prompt)
    offered(offers, ANSWER, node(ANSWER, prompt))

    assert len(offers) == 1
    offer = offers.take()
    assert offer.key.tokens().tolist() == ANSWER
    assert offer.span(1).pages.tolist() == [2, 3]
    assert len(offers) == 0


def test_two_answers_of_one_prompt_are_two(offers: Offers) -> None:
    prompt = node(PROMPT)
    offered(offers, PROMPT, prompt)
    offered(offers, ANSWER, node(ANSWER, prompt))
    offered(offers, [1, 2, 4], node([1, 2, 4], prompt))

    assert taken(offers) == [ANSWER, [1, 2, 4]]


def test_an_answer_waits_by_itself_once_its_prompt_was_taken(offers: Offers) -> None:
    prompt = node(PROMPT)
    offered(offers, PROMPT, prompt)
    assert taken(offers) == [PROMPT]
    offered(offers, ANSWER, node(ANSWER, prompt))

    assert taken(offers) == [ANSWER]


def test_where_a_longer_prefix_says_nothing_of_a_shorter_one_both_wait() -> None:
    offers = Offers(covers_shorter=False)
    prompt = node(PROMPT)
    offered(offers, PROMPT, prompt)
    offered(offers, ANSWER, node(ANSWER, prompt))

    assert taken(offers) == [PROMPT, ANSWER]


def test_what_goes_on_waiting_keeps_its_place_first_or_last(offers: Offers) -> None:
    for token in (1, 2, 3):
        offered(offers, [token], node([token]))
    first = offers.take()
    offers.put_first(first)
    assert offers.take() is first
    offers.put_last(first)

    assert taken(offers) == [[2], [3], [1]]


def test_offers_that_continue_a_key_are_forgotten_and_others_stay(offers: Offers) -> None:
    nine = node([9])
    offered(offers, PROMPT, node(PROMPT))
    offered(offers, [9], nine)

    offers.forget_from(key_of([1]))
    offered(offers, [9, 8], node([9, 8], nine))

    assert taken(offers) == [[9, 8]]


def test_no_more_wait_than_there_may(offers: Offers) -> None:
    for token in range(MAX_OFFERS):
        offered(offers, [token], node([token]))

    assert not offers.add(key_of([MAX_OFFERS]), node([MAX_OFFERS]), np.array([1], np.int32))
