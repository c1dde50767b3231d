"""Keys and their heads."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.keys import Namespace, RadixKey

TOKENS = np.arange(10, dtype=np.int32)
NAMESPACE = Namespace(adapter="a")


@pytest.mark.parametrize("num_tokens", [0, 1, 4, 10, 11])
def test_a_head_is_the_key_of_its_tokens(num_tokens: int) -> None:
    # given
    key = RadixKey.of(TOKENS, NAMESPACE, 3)

    # when
    head = key.head(num_tokens)

    # then
    alone = RadixKey.of(TOKENS[:num_tokens], NAMESPACE, 3)
    assert head.uncut is key.uncut
    assert (head.num_tokens, head.namespace, head.priority) == (alone.num_tokens, NAMESPACE, 3)
    assert head.tokens().tolist() == TOKENS[:num_tokens].tolist()
    assert head.raw == alone.raw


def test_cutting_a_head_leaves_its_key_and_other_heads_whole() -> None:
    # given heads of one key, and of a head
    key = RadixKey.of(TOKENS)
    longer = key.head(6)
    shorter = longer.head(2)

    # when
    assert len(shorter.raw) == 8

    # then
    assert longer.head(20).num_tokens == 6
    assert longer.raw == TOKENS[:6].tobytes()
    assert key.raw == TOKENS.tobytes()
