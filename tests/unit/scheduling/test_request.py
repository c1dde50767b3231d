"""Cached tokens by tier."""

from __future__ import annotations

import numpy as np
import pytest

from app.caches.tiers.ports import RestoredTokens
from app.core.sampling import SamplingParams
from app.scheduling.request import Request, RequestOutput, Sequence


@pytest.mark.parametrize(
    ("cached", "brought", "told"),
    [
        (40, (0, 0), {"device": 40, "host": 0, "storage": 0}),
        (40, (16, 8), {"device": 16, "host": 16, "storage": 8}),
        (20, (16, 8), {"device": 0, "host": 16, "storage": 4}),  # the end of it was evicted again
        (8, (16, 8), {"device": 0, "host": 8, "storage": 0}),
        (0, (16, 8), {"device": 0, "host": 0, "storage": 0}),
    ],
)
def test_tokens_by_tier_add_up_to_what_was_cached(cached: int, brought: tuple[int, int], told: dict[str, int]) -> None:
    # given
    request = Request(request_id="r", prompt_token_ids=np.arange(50, dtype=np.int32))
    sequence = Sequence(request, SamplingParams(seed=0), 0)

    # when
    sequence.note_cached(cached, RestoredTokens(*brought))
    output = RequestOutput(
        request_id="r",
        text="",
        token_ids=[],
        prompt_tokens=50,
        cached_tokens=sequence.cached_tokens or 0,
        finish_reason="length",
        restored_tokens=sequence.restored_tokens,
    )

    # then
    assert output.cached_by_tier == told
    assert sum(told.values()) == output.cached_tokens
