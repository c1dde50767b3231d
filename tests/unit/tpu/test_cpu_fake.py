"""The fakes are unforgiving: one wrong page, position or use of a dead array shows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.core.ports import DecodeInputs, ModelRunner, PoolSpec
from app.errors import OwnershipError
from app.tpu.cpu_fake import LOGIT_SCALE, POISON, FakeDevicePool, FakeModelRunner, fake_model_config
from app.tpu.failing_runner import FailingRunner, InjectedFailure
from tests.support.llama_rig import Rows, spec_of

CONFIG = fake_model_config()
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, 24).astype(np.int32)


def open_pool(dtype: str = "float32", num_layers: int = 1) -> FakeDevicePool:
    spec = PoolSpec(num_pages=32, page_size=4, num_layers=num_layers, num_kv_heads=1, head_dim=1, dtype=dtype)
    pool = FakeDevicePool(spec)
    pool.open()
    return pool


def fake_rows(pool: FakeDevicePool, seed: int = 0, runner: ModelRunner | None = None) -> Rows:
    return Rows(runner or FakeModelRunner(CONFIG.vocab_size), pool, num_rows=2, num_pages=8, seed=seed)


def failing(step: int, *, at_dispatch: bool) -> FailingRunner:
    return FailingRunner(FakeModelRunner(CONFIG.vocab_size), InjectedFailure(step=step, at_dispatch=at_dispatch))


def whole(tokens: np.ndarray) -> np.ndarray:
    """Logits after `tokens`, computed in one chunk on an empty pool."""
    return fake_rows(open_pool()).extend([0], [tokens], [0], num_tokens=32, max_chunk=32)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16_bits"])
def test_chunks_batches_pages_and_storage_do_not_change_the_answer(dtype: str) -> None:
    rows = fake_rows(open_pool(dtype, num_layers=2), seed=7)

    rows.extend([1, 0], [TOKENS[:9], TOKENS[:3]], [0, 0], num_tokens=32, max_chunk=32)
    extended = rows.extend([0, 1], [TOKENS[3:11], TOKENS[9:22]], [3, 9], num_tokens=32, max_chunk=32)
    decoded = rows.decode([1, 0], [int(TOKENS[22]), int(TOKENS[11])], [23, 12])

    np.testing.assert_array_equal(extended, [whole(TOKENS[:11]), whole(TOKENS[:22])])
    np.testing.assert_array_equal(decoded, [whole(TOKENS[:23]), whole(TOKENS[:12])])


def test_every_token_of_the_context_matters() -> None:
    answers = {whole(TOKENS[:12]).tobytes()}
    for index in range(12):
        changed = TOKENS[:12].copy()
        changed[index] = (changed[index] + 1) % CONFIG.vocab_size
        answers.add(whole(changed).tobytes())

    assert len(answers) == 13


def test_every_page_that_is_read_matters() -> None:
    for page_index in range(3):
        pool = open_pool()
        rows = fake_rows(pool)
        rows.extend([0], [TOKENS[:11]], [0], num_tokens=16, max_chunk=16)
        pool.poison(rows.pages[0, page_index : page_index + 1])
        assert (rows.decode([0], [int(TOKENS[11])], [12])[0] != whole(TOKENS[:12])).any()

        pool = open_pool()
        rows = fake_rows(pool)
        rows.extend([0], [TOKENS[:11]], [0], num_tokens=16, max_chunk=16)
        rows.pages[0, page_index] = rows.pages[1, 0]  # an empty page
        assert (rows.decode([0], [int(TOKENS[11])], [12])[0] != whole(TOKENS[:12])).any()


def test_swapped_pages_and_wrong_positions_matter() -> None:
    rows = fake_rows(open_pool())
    rows.extend([0], [TOKENS[:11]], [0], num_tokens=16, max_chunk=16)
    wrong_position = rows.decode([0], [int(TOKENS[11])], [11])[0]
    rows.pages[0, [0, 1]] = rows.pages[0, [1, 0]]
    swapped = rows.decode([0], [int(TOKENS[11])], [12])[0]

    assert (wrong_position != whole(TOKENS[:12])).any()
    assert (swapped != whole(TOKENS[:12])).any()


def test_pages_that_are_not_read_do_not_matter() -> None:
    pool = open_pool()
    rows = fake_rows(pool)
    rows.extend([0], [TOKENS[:11]], [0], num_tokens=16, max_chunk=16)
    pool.poison(np.setdiff1d(np.arange(33), rows.pages[0, :3]).astype(np.int32))

    np.testing.assert_array_equal(rows.decode([0], [int(TOKENS[11])], [12])[0], whole(TOKENS[:12]))


def test_logits_are_finite_distinct_and_spread() -> None:
    logits = whole(TOKENS)

    assert np.isfinite(logits).all()
    assert 0 <= logits.min() < 1 < LOGIT_SCALE - 1 < logits.max() < LOGIT_SCALE
    assert np.unique(logits).size == logits.size


def test_arrays_die_with_put_even_when_nothing_donated_them() -> None:
    pool = open_pool()
    taken = pool.take()
    copies = jax.tree.map(jnp.copy, taken)

    with pytest.raises(OwnershipError, match="taken already"):
        pool.take()
    pool.put(copies)

    assert all(array.is_deleted() for array in jax.tree.leaves(taken))
    assert pool.take() is copies


def test_poison_fills_the_pages_it_is_given() -> None:
    pool = open_pool("bfloat16_bits")
    pool.poison(np.array([2], np.int32))

    assert (pool.page_contents(np.array([2], np.int32)) == POISON).all()
    assert not pool.page_contents(np.array([0, 1, 3], np.int32)).any()


def test_failure_at_dispatch_raises_and_consumes_the_arrays() -> None:
    pool = open_pool()
    rows = fake_rows(pool, runner=failing(1, at_dispatch=True))
    rows.extend([0], [TOKENS[:3]], [0], num_tokens=16, max_chunk=16)

    with pytest.raises(RuntimeError, match="injected"):
        rows.decode([0], [1], [4])

    assert pool.lost()
    pool.reset()
    rows.extend([0], [TOKENS[:3]], [0], num_tokens=16, max_chunk=16)


def test_failure_while_running_is_raised_when_the_result_is_read() -> None:
    pool = open_pool()
    runner = failing(0, at_dispatch=False)
    inputs = DecodeInputs(
        token_ids=jnp.zeros(2, jnp.int32),
        lengths=jnp.ones(2, jnp.int32),
        page_table=jnp.array([[1], [2]], jnp.int32),
    )
    taken = pool.take()

    buffers, logits = runner.decode(taken, inputs)
    pool.put(buffers)

    assert all(array.is_deleted() for array in jax.tree.leaves(taken))
    with pytest.raises(jax.errors.JaxRuntimeError, match="memory"):
        np.asarray(logits)
    pool.reset()
    pool.put(runner.decode(pool.take(), inputs)[0])
    assert not pool.lost()


def test_the_fake_model_has_the_smallest_pool() -> None:
    assert spec_of(CONFIG, page_size=1, num_pages=1).page_bytes == 8
