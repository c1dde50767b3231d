"""Routers and experts against float64, token by token and expert by expert. float32, 2e-5 of the greatest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.models.layers import moe
from app.models.layers.moe import Chosen, ClampedGate, ExpertWeights, GroupRouter, SoftmaxRouter, silu_gate
from tests.support.one_rank import on_one_rank

EMBED, FFN, NUM_EXPERTS, PER_TOKEN = 24, 40, 8, 3


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32)


def expert_weights() -> ExpertWeights:
    return ExpertWeights(
        gate=jnp.asarray(normal(1, NUM_EXPERTS, EMBED, FFN)) * EMBED**-0.5,
        up=jnp.asarray(normal(2, NUM_EXPERTS, EMBED, FFN)) * EMBED**-0.5,
        down=jnp.asarray(normal(3, NUM_EXPERTS, FFN, EMBED)) * FFN**-0.5,
    )


def with_biases(weights: ExpertWeights) -> ExpertWeights:
    return weights._replace(
        gate_bias=jnp.asarray(normal(4, NUM_EXPERTS, FFN)),
        up_bias=jnp.asarray(normal(5, NUM_EXPERTS, FFN)),
        down_bias=jnp.asarray(normal(6, NUM_EXPERTS, EMBED)),
    )


@dataclass(frozen=True)
class Case:
    weights: ExpertWeights
    gate: moe.Gate
    wide_gate: Callable[[np.ndarray, np.ndarray], np.ndarray]  # the same in float64

    def share(self, x: np.ndarray, chosen: Chosen) -> Any:
        return on_one_rank(partial(moe.experts_share, gate=self.gate))(x, chosen, self.weights)

    def wanted(self, x: np.ndarray, chosen: Chosen) -> np.ndarray:
        experts, shares = np.asarray(chosen.experts), np.asarray(chosen.weights, np.float64)
        found = [
            sum(share * self._one_token(token, expert) for expert, share in zip(*own, strict=True))
            for token, *own in zip(x.astype(np.float64), experts, shares, strict=True)
        ]
        return np.array(found)

    def _one_token(self, x: np.ndarray, expert: int) -> np.ndarray:
        own = [leaf if leaf is None else np.asarray(leaf, np.float64)[expert] for leaf in self.weights]
        gate_bias, up_bias, down_bias = (0 if bias is None else bias for bias in own[3:])
        return self.wide_gate(x @ own[0] + gate_bias, x @ own[1] + up_bias) @ own[2] + down_bias


def wide_silu(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return up * gate / (1 + np.exp(-gate))


def wide_clamped(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    gate, up = np.minimum(gate, 1.2), np.clip(up, -1.2, 1.2)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate))


def assert_near(got: Any, wanted: Any) -> None:
    assert np.abs(np.asarray(got) - wanted).max() <= 2e-5 * np.abs(wanted).max()


# ---- routers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalised", [True, False])
def test_the_softmax_router_takes_the_most_probable_experts(normalised: bool) -> None:
    logits = normal(7, 50, NUM_EXPERTS) * 3

    chosen = SoftmaxRouter(PER_TOKEN, normalised)(jnp.asarray(logits))

    probabilities = np.exp(logits.astype(np.float64))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    experts = np.argsort(-logits, axis=1)[:, :PER_TOKEN]
    weights = np.take_along_axis(probabilities, experts, axis=1)
    np.testing.assert_array_equal(chosen.experts, experts)
    assert_near(chosen.weights, weights / weights.sum(axis=1, keepdims=True) if normalised else weights)


@pytest.mark.parametrize("normalised", [True, False])
def test_the_group_router_takes_experts_of_the_best_groups_only(normalised: bool) -> None:
    logits, bias = normal(8, 200, NUM_EXPERTS) * 2, normal(9, NUM_EXPERTS) * 0.3
    router = GroupRouter(
        experts_per_token=PER_TOKEN, num_groups=4, groups_per_token=2, scale=2.5, normalised=normalised
    )

    chosen = router(jnp.asarray(logits), jnp.asarray(bias))

    scores = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for row, (score, experts) in enumerate(zip(scores, np.asarray(chosen.experts), strict=True)):
        by_group = (score + bias).reshape(4, 2)  # groups of two experts: each counts as their sum
        groups = np.argsort(-by_group.sum(axis=1))[:2]
        allowed = [expert for expert in range(NUM_EXPERTS) if expert // 2 in groups]
        best = sorted(allowed, key=lambda expert: -(score + bias)[expert])[:PER_TOKEN]
        assert experts.tolist() == best
        weights = score[best] / score[best].sum() if normalised else score[best]
        assert_near(chosen.weights[row], 2.5 * weights)


def test_a_bias_of_the_group_router_changes_choices_but_no_weights() -> None:
    router = GroupRouter(experts_per_token=1, num_groups=1, groups_per_token=1, scale=1.0, normalised=False)
    logits = jnp.array([[2.0, 1.0]])

    plain = router(logits, jnp.array([0.0, 0.0]))
    biased = router(logits, jnp.array([0.0, 1.0]))

    assert (plain.experts.item(), biased.experts.item()) == (0, 1)
    assert biased.weights.item() == pytest.approx(1 / (1 + np.exp(-1)), rel=1e-6)


# ---- experts --------------------------------------------------------------------------------------------------------

CASES = {
    "silu": Case(expert_weights(), silu_gate, wide_silu),
    "clamped, with biases": Case(with_biases(expert_weights()), ClampedGate(limit=1.2, steepness=1.702), wide_clamped),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@EVERY_CASE
@pytest.mark.parametrize("num_tokens", [2, 7, 150])
def test_each_token_gets_the_sum_of_its_experts(case: Case, num_tokens: int) -> None:
    x = normal(10, num_tokens, EMBED)
    chosen = SoftmaxRouter(PER_TOKEN)(jnp.asarray(normal(11, num_tokens, NUM_EXPERTS)))

    assert_near(case.share(x, chosen), case.wanted(x, chosen))


@EVERY_CASE
@settings(max_examples=15, deadline=None)
@given(experts=st.lists(st.sampled_from([0, 3, 7]), min_size=9, max_size=9))
def test_however_unevenly_tokens_choose(case: Case, experts: list[int]) -> None:
    x = normal(12, 9, EMBED)
    chosen = Chosen(jnp.array(experts, jnp.int32)[:, None], jnp.asarray(normal(13, 9, 1)))

    assert_near(case.share(x, chosen), case.wanted(x, chosen))


@EVERY_CASE
def test_the_way_of_tpus_gives_the_same(case: Case) -> None:
    counts = jnp.array([5, 0, 40, 1, 0, 3, 0, 7], jnp.int32)
    sorted_x = jnp.asarray(normal(14, 64, EMBED))  # eight rows more than the experts have: other ranks' tokens

    blocks = moe.by_blocks(sorted_x, counts, case.weights, gate=case.gate, block=4)
    ragged = moe.by_ragged_products(sorted_x, counts, case.weights, gate=case.gate)

    assert_near(ragged, np.asarray(blocks, np.float64))
    assert not np.asarray(ragged)[56:].any()


@EVERY_CASE
def test_a_token_gets_the_same_whatever_else_is_in_the_batch(case: Case) -> None:
    x, logits = normal(15, 20, EMBED), normal(16, 20, NUM_EXPERTS)
    router = SoftmaxRouter(PER_TOKEN)
    before = case.share(x, router(jnp.asarray(logits)))

    logits[1:] = normal(17, 19, NUM_EXPERTS)
    x[1:] = normal(18, 19, EMBED)
    after = case.share(x, router(jnp.asarray(logits)))

    np.testing.assert_array_equal(np.asarray(before)[0], np.asarray(after)[0])
