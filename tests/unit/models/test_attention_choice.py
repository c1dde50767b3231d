"""Which attention serves which shapes, and what it makes the pool store."""

from __future__ import annotations

import pytest

from app.models.layers.attention_choice import AttentionKind, choose_attention

BF16 = {"pool_dtype": "bfloat16", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "tp_size", "extra"),
    [
        (8, 128, 1, (0, 0)),
        (8, 128, 8, (0, 0)),
        (4, 128, 4, (0, 0)),
        (32, 96, 1, (0, 32)),  # longer by a third
        (3, 128, 1, (1, 0)),  # a fourth head fills the tile
        (6, 128, 2, (2, 0)),  # one on each rank
        (12, 128, 1, (4, 0)),
    ],
)
def test_heads_that_fill_tiles_are_served_by_the_kernel(
    num_kv_heads: int, head_dim: int, tp_size: int, extra: tuple[int, int]
) -> None:
    choice = choose_attention(platform="tpu", num_kv_heads=num_kv_heads, head_dim=head_dim, tp_size=tp_size, **BF16)

    assert choice.kind is AttentionKind.RAGGED
    assert (choice.extra_kv_heads, choice.extra_head_dim) == extra


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "why"),
    [
        (3, 64, "3 KV heads of 64 a rank as 4 of 128, 167% more memory"),
        (8, 64, "8 of 128, 100% more memory"),
        (5, 128, "5 KV heads of 128 a rank as 8 of 128, 60% more memory"),
        (8, 256, "no head_dim of 256"),
    ],
)
def test_other_heads_are_gathered_and_the_choice_says_why(num_kv_heads: int, head_dim: int, why: str) -> None:
    choice = choose_attention(platform="tpu", num_kv_heads=num_kv_heads, head_dim=head_dim, tp_size=1, **BF16)

    assert choice.kind is AttentionKind.GATHER
    assert why in choice.reason
    assert (choice.extra_kv_heads, choice.extra_head_dim) == (0, 0)


def test_a_pool_of_another_type_than_the_queries_is_gathered() -> None:
    choice = choose_attention(
        platform="tpu", num_kv_heads=8, head_dim=128, tp_size=1, pool_dtype="bfloat16", dtype="float32"
    )

    assert choice.kind is AttentionKind.GATHER
    assert "float32 queries meet a bfloat16 pool" in choice.reason


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 64), (8, 128), (1, 256)])
def test_cpu_serves_every_shape_as_it_is(num_kv_heads: int, head_dim: int) -> None:
    choice = choose_attention(
        platform="cpu",
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tp_size=1,
        pool_dtype="bfloat16_bits",
        dtype="bfloat16",
    )

    assert choice.kind is AttentionKind.ROWS
    assert (choice.extra_kv_heads, choice.extra_head_dim) == (0, 0)
