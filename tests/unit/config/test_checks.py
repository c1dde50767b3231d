"""Settings against a model."""

from __future__ import annotations

from typing import Any

import pytest

from app.config.checks import advice, check_against_model
from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.errors import ConfigError


def model(*, num_heads: int = 9, num_kv_heads: int = 3, context_length: int = 8192) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=100,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=8,
        context_length=context_length,
    )


def refusal(config: ModelConfig, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        check_against_model(ServerArgs(**settings), config)
    return str(caught.value)


def test_context_up_to_the_models_is_accepted_and_one_more_is_refused() -> None:
    check_against_model(ServerArgs(context_length=8192), model())

    assert refusal(model(), context_length=8193) == (
        "--context-length=8193 is not allowed: 2 to 8192, the most that this model was made for"
    )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "good"),
    [
        (9, 3, {1, 3, 9}),  # 9: each KV head three times
        (8, 8, {1, 2, 4, 8}),
        (8, 2, {1, 2, 4, 8}),
        (12, 4, {1, 2, 4, 12}),
        (8, 1, {1, 2, 4, 8}),
    ],
)
def test_heads_are_split_evenly_or_refused_naming_both_numbers(
    num_heads: int, num_kv_heads: int, good: set[int]
) -> None:
    config = model(num_heads=num_heads, num_kv_heads=num_kv_heads)
    for tp_size in good:
        check_against_model(ServerArgs(tp_size=tp_size), config)

    for tp_size in set(range(1, 17)) - good:
        message = refusal(config, tp_size=tp_size)
        assert message.startswith(f"--tp-size={tp_size} is not allowed: ")
        assert f"{num_heads} attention heads" in message or f"{num_kv_heads} KV heads" in message


def test_context_is_reported_before_tensor_parallelism() -> None:
    assert refusal(model(), tp_size=2, context_length=9000).startswith("--context-length=9000 ")


def test_nothing_is_advised_where_nothing_surprises() -> None:
    assert advice(ServerArgs(), model(), "radix_cache", 8192) == []


@pytest.mark.parametrize(
    ("settings", "cache_type", "pool_tokens", "words"),
    [
        ({"disaggregation_mode": "prefill"}, "radix_cache", 8192, "serves whole requests itself"),
        ({"disaggregation_mode": "decode"}, "chunk_cache", 8192, "serves whole requests itself"),
        ({}, "radix_cache", 8191, "the pool holds 8191 tokens and the context is 8192"),
        ({"context_length": 64}, "radix_cache", 48, "the pool holds 48 tokens and the context is 64"),
        ({"schedule_policy": "lpm"}, "chunk_cache", 8192, "no effect with chunk_cache"),
        ({"check_invariants": True}, "radix_cache", 8192, "slower"),
        ({"disable_overlap": True}, "radix_cache", 8192, "wait for the one before"),
    ],
)
def test_what_may_surprise_is_said(settings: dict[str, Any], cache_type: str, pool_tokens: int, words: str) -> None:
    (sentence,) = advice(ServerArgs(**settings), model(), cache_type, pool_tokens)

    assert words in sentence
