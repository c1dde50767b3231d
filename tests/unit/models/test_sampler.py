"""The device sampler against exact references in numpy."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from app.core.sampling import MAX_LOGPROBS, SamplingParams
from app.models.sampler import (
    Choice,
    Logprobs,
    PenaltyRows,
    PenaltyTables,
    SamplingRows,
    SamplingVariant,
    penalty_row,
    sample,
    split_seed,
)
from app.tpu.mesh import make_mesh

VOCAB = 64
FILTERED = SamplingVariant(Choice.FILTERED, Logprobs.NONE)


def rows_of(*params: SamplingParams, positions: list[int] | None = None) -> SamplingRows:
    return SamplingRows(
        temperature=jnp.array([each.temperature for each in params], jnp.float32),
        top_p=jnp.array([each.top_p for each in params], jnp.float32),
        top_k=jnp.array([each.top_k for each in params], jnp.int32),
        min_p=jnp.array([each.min_p for each in params], jnp.float32),
        seeds=jnp.array([split_seed(each.seed or 0) for each in params], jnp.uint32),
        positions=jnp.array(positions or [0] * len(params), jnp.int32),
    )


def penalties_of(tables: PenaltyTables, slots: list[int], *params: SamplingParams) -> PenaltyRows:
    return PenaltyRows(
        tables=tables.arrays(),
        slots=jnp.array(slots, jnp.int32),
        repetition=jnp.array([each.repetition_penalty for each in params], jnp.float32),
        frequency=jnp.array([each.frequency_penalty for each in params], jnp.float32),
        presence=jnp.array([each.presence_penalty for each in params], jnp.float32),
    )


def random_logits(num_rows: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((num_rows, VOCAB)) * 2).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def reference_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """(V,) logits -> (V,) probabilities by sorting, in the documented order."""
    probabilities = np.exp(log_softmax(logits / params.temperature))
    order = np.argsort(-probabilities, kind="stable")
    keep = np.zeros(VOCAB, bool)
    keep[order[: params.top_k if params.top_k > 0 else VOCAB]] = True
    probabilities = np.where(keep, probabilities, 0) / probabilities[keep].sum()
    above = np.cumsum(probabilities[order]) - probabilities[order]
    keep[order[above >= params.top_p]] = False
    keep &= probabilities >= params.min_p * probabilities.max()
    return np.where(keep, probabilities, 0) / probabilities[keep].sum()


def draws(logits: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    """`count` draws of one row, at positions 0.."""
    rows = rows_of(*[params] * count, positions=list(range(count)))
    variant = SamplingVariant.covering([params])
    return np.array(sample(jnp.broadcast_to(logits, (count, VOCAB)), rows, None, variant=variant).token_ids)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.7),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.5, top_k=20, top_p=0.8, min_p=0.05),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(temperature=1e-30),
    ],
    ids=str,
)
def test_draws_follow_the_reference_distribution(params: SamplingParams) -> None:
    logits = random_logits(1)[0]
    expected = reference_distribution(logits, params)
    count = 4096

    seen = np.bincount(draws(logits, params, count), minlength=VOCAB) / count

    assert not seen[expected == 0].any()
    # Five standard deviations of a binomial for each token.
    assert (np.abs(seen - expected) <= 5 * np.sqrt(expected * (1 - expected) / count) + 1e-9).all()


def test_filter_keeps_exactly_the_reference_set() -> None:
    for seed in range(6):
        logits = random_logits(1, seed)[0]
        generator = np.random.default_rng(seed)
        params = SamplingParams(
            temperature=1.0,
            top_k=int(generator.integers(1, VOCAB + 5)),
            top_p=float(generator.uniform(0.1, 1.0)),
            min_p=float(generator.uniform(0, 0.2)),
        )
        support = np.flatnonzero(reference_distribution(logits, params))

        seen = np.unique(draws(logits, params, 2048))

        assert set(seen) <= set(support)
        assert set(support[reference_distribution(logits, params)[support] > 1e-2]) <= set(seen)


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = np.full(VOCAB, -10, np.float32)
    logits[[3, 7, 9]] = 1.0

    seen = np.unique(draws(logits, SamplingParams(temperature=1.0, top_k=2), 256))

    assert seen.tolist() == [3, 7, 9]


@pytest.mark.parametrize("temperature", [1e-30, 1e-38, 1e-40, 1e-45, 5e-324])
@pytest.mark.parametrize("choice", [Choice.SAMPLE, Choice.FILTERED])
def test_the_smallest_temperatures_are_as_good_as_greedy(choice: Choice, temperature: float) -> None:
    logits = random_logits(8)
    rows = rows_of(*[SamplingParams(temperature=temperature, top_p=5e-324, seed=seed) for seed in range(8)])

    chosen = sample(logits, rows, None, variant=SamplingVariant(choice)).token_ids

    assert chosen.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e6])
@pytest.mark.parametrize("repetition", [1e-3, 1e3])
def test_the_outermost_parameters_leave_numbers_that_can_be_drawn_from(repetition: float, temperature: float) -> None:
    """Nothing becomes infinite or not a number: then no token would be drawn, or always the same."""
    params = SamplingParams(
        temperature=temperature, repetition_penalty=repetition, frequency_penalty=2.0, logit_bias={5: 100.0, 6: -100.0}
    )
    logits = np.concatenate([random_logits(7), np.zeros((1, VOCAB), np.float32)]) * 50
    tables = PenaltyTables(8, VOCAB, make_mesh(1, "cpu"))
    known = np.arange(0, VOCAB, 2, dtype=np.int32)
    for slot in range(8):
        tables.set_row(slot, *penalty_row(known, known.size // 2, params.logit_bias, VOCAB))
    bias = np.zeros(VOCAB, np.float32)
    bias[[5, 6]] = 100, -100
    biased = logits.astype(np.float64) + bias
    seen, counts = np.isin(np.arange(VOCAB), known), np.isin(np.arange(VOCAB), known[known.size // 2 :])
    expected = np.where(seen, np.where(biased > 0, biased / repetition, biased * repetition), biased) - 2.0 * counts

    penalties = penalties_of(tables, list(range(8)), *[params] * 8)
    rows = rows_of(*[params] * 8, positions=list(range(8)))
    chosen = np.asarray(sample(logits, rows, penalties, variant=FILTERED).token_ids)

    assert ((chosen >= 0) & (chosen < VOCAB)).all()
    if temperature < 1:
        assert chosen.tolist() == expected.argmax(-1).tolist()
    else:
        assert np.unique(chosen).size > 3


def test_temperature_zero_is_argmax_in_every_variant() -> None:
    logits = random_logits(2)
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0, top_k=3)
    for choice in Choice:
        tokens = sample(jnp.array(logits), rows_of(greedy, sampled), None, variant=SamplingVariant(choice)).token_ids
        assert tokens[0] == logits[0].argmax()


def test_draw_depends_on_seed_and_position_not_on_batch_mates() -> None:
    logits = random_logits(8)
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=0x123456789ABCDEF)
    others = [SamplingParams(temperature=0.7 + i, seed=i) for i in range(7)]

    alone = sample(
        jnp.array(logits[[0, 1]]), rows_of(params, others[0], positions=[17, 0]), None, variant=FILTERED
    ).token_ids[0]
    last = sample(
        jnp.array(logits[[1, 2, 3, 4, 5, 6, 7, 0]]),
        rows_of(*others, params, positions=[3, 1, 4, 1, 5, 9, 2, 17]),
        None,
        variant=FILTERED,
    ).token_ids[7]
    without_filter = [
        int(draws(logits[0], SamplingParams(temperature=1.0, seed=seed), 40).sum()) for seed in (1, 1, 2, 1 << 40)
    ]

    assert alone == last
    assert without_filter[0] == without_filter[1]
    assert len(set(without_filter)) == 3


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = random_logits(2)
    params = [SamplingParams(temperature=0.3, top_k=2, seed=5, logprobs=20), SamplingParams(logprobs=0)]
    tables = PenaltyTables(num_rows=4, vocab_size=VOCAB, mesh=make_mesh(1, "cpu"))
    tables.set_row(1, *penalty_row(np.array([1, 2], np.int32), 1, {int(logits[0].argmin()): 100.0}, VOCAB))

    result = sample(
        jnp.array(logits),
        rows_of(*params),
        penalties_of(tables, [1, 4], *params),
        variant=SamplingVariant.covering(params),
    )

    expected = log_softmax(logits)
    order = np.argsort(-expected, axis=-1)[:, :MAX_LOGPROBS]
    chosen = np.array(result.token_ids)
    assert chosen[0] == logits[0].argmin()
    np.testing.assert_allclose(result.logprobs, expected[[0, 1], chosen], atol=1e-5)
    np.testing.assert_array_equal(result.top_token_ids, order)
    np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(expected, order, -1), atol=1e-5)


def test_penalties_follow_the_reference_and_leave_other_rows_exactly_alone() -> None:
    logits = random_logits(2, seed=3)
    known = np.array([5, 6, 7, 5, 9, 9, 11], np.int32)  # prompt 5 6 7, output 5 9 9 11
    params = SamplingParams(
        repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.3, logit_bias={20: 1.25, 9: -2.0}
    )
    counts, seen, bias = penalty_row(known, 3, params.logit_bias, VOCAB)
    tables = PenaltyTables(num_rows=3, vocab_size=VOCAB, mesh=make_mesh(1, "cpu"))
    tables.set_row(2, counts, seen, bias)

    expected = logits[0] + bias
    repeated = np.where(expected > 0, expected / 1.5, expected * 1.5)
    expected = np.where(seen | (counts > 0), repeated, expected) - 0.4 * counts - 0.3 * (counts > 0)

    # The greedy choice is read out token by token: banning what was chosen shows the whole order.
    order = []
    for _ in range(VOCAB):
        rows = rows_of(params, SamplingParams())
        tokens = sample(
            jnp.array(logits), rows, penalties_of(tables, [2, 3], params, SamplingParams()), variant=SamplingVariant()
        ).token_ids
        order.append(int(tokens[0]))
        assert tokens[1] == logits[1].argmax()
        logits[0, order[-1]] = -1e9
    np.testing.assert_array_equal(order, np.argsort(-expected, kind="stable"))


def test_recorded_tokens_count_and_rows_beyond_the_table_are_dropped() -> None:
    tables = PenaltyTables(num_rows=2, vocab_size=VOCAB, mesh=make_mesh(1, "cpu"))
    tables.set_row(1, *penalty_row(np.array([4], np.int32), 1, {}, VOCAB))
    tables.set_row(0, *penalty_row(np.array([4, 4], np.int32), 1, {}, VOCAB))

    tables.record(jnp.array([1, 2]), jnp.array([8, 9]))
    tables.record(jnp.array([1, 2]), jnp.array([8, 9]))

    counts = np.array(tables.arrays().output_counts)
    assert counts[1, 8] == 2
    assert counts[0, 4] == 1
    assert counts.sum() == 3


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ([], SamplingVariant(Choice.GREEDY, Logprobs.NONE)),
        ([SamplingParams(top_k=4)], SamplingVariant(Choice.GREEDY, Logprobs.NONE)),
        (
            [SamplingParams(), SamplingParams(temperature=1, logprobs=0)],
            SamplingVariant(Choice.SAMPLE, Logprobs.CHOSEN),
        ),
        (
            [SamplingParams(temperature=1, min_p=0.1), SamplingParams(logprobs=2)],
            SamplingVariant(Choice.FILTERED, Logprobs.TOP),
        ),
    ],
)
def test_covering_variant_is_the_cheapest(params: list[SamplingParams], expected: SamplingVariant) -> None:
    assert SamplingVariant.covering(params) == expected
