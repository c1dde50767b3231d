"""What waits to be copied, and how long: a prompt and its answer are one copy."""

from __future__ import annotations

import numpy as np
import pytest

from app.caches.tiers.offers import MAX_OFFERS, Offers
from app.caches.tree.node import TreeNode
from app.config.tier_settings import TierSettings
from app.core.keys import DEFAULT_NAMESPACE, RadixKey
from app.core.transfers import Backup
from tests.support.tier_runtime import TierRig
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
    return [offers.take().key.tokens().tolist() for _ in range(offers.num_ready)]


def test_a_prompt_waits_for_its_answer_and_both_are_one() -> None:
    offers = Offers(patience=3)
    prompt = node(PROMPT)
    offered(offers, PROMPT, prompt)
    offers.next_plan()
    assert (len(offers), offers.num_ready) == (1, 0)

    offered(offers, ANSWER, node(ANSWER, prompt))

    assert (len(offers), offers.num_ready) == (1, 1)
    offer = offers.take()
    assert offer.key.tokens().tolist() == ANSWER
    assert offer.span(1).pages.tolist() == [2, 3]
    assert len(offers) == 0


def test_nothing_waits_longer_than_so_many_plans() -> None:
    offers = Offers(patience=3)
    offered(offers, PROMPT, node(PROMPT))
    ready = []
    for _ in range(3):
        offers.next_plan()
        ready.append(offers.num_ready)

    assert ready == [0, 0, 1]
    assert taken(offers) == [PROMPT]


def test_what_was_continued_is_not_ready_a_second_time_when_it_would_have_been_due() -> None:
    offers = Offers(patience=2)
    prompt = node(PROMPT)
    offered(offers, PROMPT, prompt)
    offered(offers, ANSWER, node(ANSWER, prompt))
    assert taken(offers) == [ANSWER]

    for _ in range(3):
        offers.next_plan()
    offers.ripen()

    assert (len(offers), offers.num_ready) == (0, 0)


def test_two_answers_of_one_prompt_are_two() -> None:
    offers = Offers(patience=3)
    prompt = node(PROMPT)
    offered(offers, PROMPT, prompt)
    offered(offers, ANSWER, node(ANSWER, prompt))
    offered(offers, [1, 2, 4], node([1, 2, 4], prompt))
    offers.ripen()

    assert taken(offers) == [ANSWER, [1, 2, 4]]


@pytest.mark.parametrize(("patience", "copies"), [(0, [ANSWER]), (None, [PROMPT, ANSWER])])
def test_without_patience_all_is_ready_and_one_takes_anothers_place_where_it_may(
    patience: int | None, copies: list[list[int]]
) -> None:
    offers = Offers(patience=patience)
    prompt = node(PROMPT)
    offered(offers, PROMPT, prompt)
    assert offers.num_ready == 1
    offered(offers, ANSWER, node(ANSWER, prompt))

    assert taken(offers) == copies


def test_what_goes_on_waiting_keeps_its_place_first_or_last() -> None:
    offers = Offers(patience=0)
    for token in (1, 2, 3):
        offered(offers, [token], node([token]))
    first = offers.take()
    offers.put_first(first)
    second = offers.take()
    offers.put_last(second)

    assert taken(offers) == [[2], [3], [1]]


def test_offers_that_continue_a_key_are_forgotten_and_others_stay() -> None:
    offers = Offers(patience=5)
    nine = node([9])
    offered(offers, PROMPT, node(PROMPT))
    offered(offers, [9], nine)

    offers.forget_from(key_of([1]))

    assert [each.key.tokens().tolist() for each in offers] == [[9]]
    offered(offers, [9, 8], node([9, 8], nine))
    assert len(offers) == 1
    assert taken(offers) == [[9, 8]]


def test_no_more_wait_than_there_may() -> None:
    offers = Offers(patience=5)
    for token in range(MAX_OFFERS):
        offered(offers, [token], node([token]))

    assert not offers.add(key_of([MAX_OFFERS]), node([MAX_OFFERS]), np.array([1], np.int32))


def test_beside_decoding_a_prompt_and_its_answer_are_copied_together() -> None:
    # given
    rig = TierRig(page_size=2, settings=TierSettings(write_policy="write_through"))
    rig.tiers.note_step(prompt_tokens=0, decode_rows=1, seconds=0.01)

    # when: the prompt was computed, and then its answer
    rig.serve(range(4))
    rig.step()
    rig.step()
    assert not rig.sent
    rig.serve(range(8))
    while not rig.sent:
        rig.step()
    rig.end_all()
    rig.step()

    # then
    assert [each.source.pages.size for each in rig.sent if isinstance(each, Backup)] == [4]
    assert rig.host_has(range(8)) == 4
    rig.check()


def test_a_prompt_whose_answer_is_still_to_come_is_not_lost_when_it_is_evicted() -> None:
    rig = TierRig(page_size=2, settings=TierSettings(write_policy="write_through"))
    rig.tiers.note_step(prompt_tokens=0, decode_rows=1, seconds=0.01)
    rig.serve(range(4))
    assert not rig.sent

    rig.cache.evict(2)
    rig.step()
    rig.drain()

    assert (rig.device_has(range(4)), rig.host_has(range(4))) == (0, 2)
    rig.check()
