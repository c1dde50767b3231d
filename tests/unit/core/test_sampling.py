"""What a request may ask of its sampling: everything that the device can compute with, and nothing else."""

from __future__ import annotations

import math
from typing import Any

import pytest

from app.core.sampling import SamplingParams
from app.errors import RequestError

BAD = [
    ("max_tokens", -1),
    ("temperature", -0.1),
    ("temperature", 1.1e6),
    ("temperature", 1e300),
    ("temperature", math.inf),
    ("temperature", math.nan),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", math.nan),
    ("top_k", 0),
    ("top_k", -2),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("seed", -1),
    ("seed", 2**64),
    ("frequency_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", 1e300),
    ("repetition_penalty", math.nan),
    ("min_tokens", 129),
    ("stop", ("",)),
    ("logprobs", 21),
    ("logit_bias", {3: 100.1}),
    ("logit_bias", {3: math.nan}),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_what_cannot_be_computed_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", 1e6),
        ("temperature", 5e-324),
        ("top_p", 5e-324),
        ("top_k", 2**31 - 1),
        ("repetition_penalty", 1e-3),
        ("repetition_penalty", 1e3),
        ("seed", 2**64 - 1),
        ("max_tokens", 2**70),
    ],
)
def test_the_outermost_is_allowed(name: str, value: Any) -> None:
    assert getattr(SamplingParams(**{name: value}), name) == value
