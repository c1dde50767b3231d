"""Every member of the Llama family, with random weights, against a dense float64 forward in numpy. float32, 2e-5."""

from __future__ import annotations

import numpy as np
import pytest

from app.config.model_config import Component, ModelConfig, RopeScaling
from app.errors import ConfigError, RuntimeClosedError
from app.models.model_runner import LlamaModelRunner
from app.models.random_weights import RandomWeights
from app.tpu.cpu_fake import FakeDevicePool
from app.tpu.mesh import make_mesh
from tests.support.dense_llama import dense_logits
from tests.support.llama_rig import Rows, open_llama, small_config, spec_of

TOLERANCE = 2e-5
LLAMA3 = RopeScaling(kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context_length=32)
FAMILY = {
    "llama": small_config(),
    "llama-tied": small_config(tie_word_embeddings=True, num_kv_heads=3),
    "llama3-rope": small_config(rope_scaling=LLAMA3, rope_theta=500.0),
    "linear-rope": small_config(rope_scaling=RopeScaling(kind="linear", factor=4.0)),
    "mistral": small_config(architecture="mistral", num_kv_heads=6, rms_norm_eps=1e-6),
    "qwen2": small_config(architecture="qwen2", attention_bias=True, num_kv_heads=1),
    "qwen3": small_config(architecture="qwen3", qk_norm=True, head_dim=32),
}
TOKENS = np.random.default_rng(1).integers(0, 101, (3, 40)).astype(np.int32)


@pytest.mark.parametrize("config", FAMILY.values(), ids=FAMILY.keys())
def test_chunks_batches_and_single_tokens_give_the_dense_logits(config: ModelConfig) -> None:
    expected = [dense_logits(config, RandomWeights(config), tokens) for tokens in TOKENS]
    rows = Rows(*open_llama(config, spec_of(config, page_size=4, num_pages=40)), num_rows=3, num_pages=12)

    # All of row 0 at once; rows 1 and 2 in chunks that share steps with it and with one another.
    first = rows.extend([0, 1, 2], [TOKENS[0], TOKENS[1, :7], TOKENS[2, :16]], [0, 0, 0], num_tokens=64, max_chunk=64)
    second = rows.extend([2, 1], [TOKENS[2, 16:17], TOKENS[1, 7:30]], [16, 7], num_tokens=32, max_chunk=32)
    np.testing.assert_allclose(first, [expected[0][39], expected[1][6], expected[2][15]], atol=TOLERANCE)
    np.testing.assert_allclose(second, [expected[2][16], expected[1][29]], atol=TOLERANCE)

    # The rest token by token.
    for step in range(6):
        token_ids = [int(TOKENS[1, 30 + step]), int(TOKENS[2, 17 + step])]
        logits = rows.decode([1, 2], token_ids, [31 + step, 18 + step])
        np.testing.assert_allclose(logits, [expected[1][30 + step], expected[2][17 + step]], atol=TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_longer_than_a_query_block_match(page_size: int) -> None:
    config = small_config(num_layers=1)
    tokens = np.random.default_rng(2).integers(0, 101, 300).astype(np.int32)
    num_pages = 320 // page_size
    rows = Rows(
        *open_llama(config, spec_of(config, page_size=page_size, num_pages=2 * num_pages)),
        num_rows=2,
        num_pages=num_pages,
    )

    logits = rows.extend([1, 0], [tokens, tokens[:140]], [0, 0], num_tokens=512, max_chunk=512)
    after = rows.extend([0], [tokens[140:]], [140], num_tokens=512, max_chunk=512)

    expected = dense_logits(config, RandomWeights(config), tokens)
    np.testing.assert_allclose(logits, expected[[299, 139]], atol=TOLERANCE)
    np.testing.assert_allclose(after[0], expected[299], atol=TOLERANCE)


def test_padding_never_dirties_page_zero_and_stale_pages_never_leak() -> None:
    config = small_config()
    spec = spec_of(config, page_size=4, num_pages=24)
    runner, _ = open_llama(config, spec)
    pool = FakeDevicePool(spec)
    pool.open()
    pool.poison(np.arange(1, 25, dtype=np.int32))
    rows = Rows(runner, pool, num_rows=2, num_pages=12)

    chunk = rows.extend([0], [TOKENS[0, :9]], [0], num_tokens=16, max_chunk=16)
    token = rows.decode([0], [int(TOKENS[0, 9])], [10])

    expected = dense_logits(config, RandomWeights(config), TOKENS[0, :10])
    np.testing.assert_allclose([chunk[0], token[0]], expected[8:], atol=TOLERANCE)
    assert not pool.page_contents(np.array([0], np.int32)).any()


def test_one_row_with_broken_numbers_does_not_spread_through_reused_pages() -> None:
    config = small_config(num_layers=2)
    spec = spec_of(config, page_size=4, num_pages=12)

    class BrokenToken(RandomWeights):
        def tensor(self, name: str) -> np.ndarray:
            tensor = super().tensor(name)
            if name == "model.embed_tokens.weight":
                tensor[100] = np.nan
            return tensor

    rows = Rows(*open_llama(config, spec, weights=BrokenToken(config)), num_rows=1, num_pages=12)
    broken = rows.extend([0], [np.full(9, 100, np.int32)], [0], num_tokens=16, max_chunk=16)
    reused = rows.extend([0], [np.array([3, 4, 5], np.int32)], [0], num_tokens=16, max_chunk=16)

    assert np.isnan(broken).all()
    expected = dense_logits(config, RandomWeights(config), np.array([3, 4, 5]))
    np.testing.assert_allclose(reused[0], expected[2], atol=TOLERANCE)


@pytest.mark.parametrize(("dtype", "pool_dtype"), [("float32", "bfloat16_bits"), ("bfloat16", "bfloat16_bits")])
def test_half_width_numbers_stay_close(dtype: str, pool_dtype: str) -> None:
    config = small_config()
    spec = spec_of(config, page_size=4, num_pages=12, dtype=pool_dtype)
    rows = Rows(*open_llama(config, spec, dtype=dtype), num_rows=1, num_pages=12)

    rows.extend([0], [TOKENS[0, :20]], [0], num_tokens=32, max_chunk=32)
    logits = rows.decode([0], [int(TOKENS[0, 20])], [21])

    expected = dense_logits(config, RandomWeights(config), TOKENS[0, :21])
    tolerance = 0.02 if dtype == "float32" else 0.1
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits[0], expected[20], atol=tolerance)


def test_weights_load_once_and_calls_without_them_are_refused() -> None:
    config = small_config()
    spec = spec_of(config, page_size=4, num_pages=4)
    told: list[float] = []
    runner = LlamaModelRunner(
        config, RandomWeights(config), make_mesh(1, "cpu"), spec, progress=lambda what, fraction: told.append(fraction)
    )
    runner.load()
    before = list(told)
    runner.load()
    runner.close()
    runner.close()

    assert before == told == sorted(told)
    assert (told[0], told[-1]) == (0.0, 1.0)
    pool = FakeDevicePool(spec)
    pool.open()
    with pytest.raises(RuntimeClosedError):
        Rows(runner, pool, num_rows=1, num_pages=1).decode([0], [1], [1])


def test_a_pool_of_another_shape_and_a_sliding_window_are_refused() -> None:
    config, other = small_config(), small_config(num_kv_heads=3)
    with pytest.raises(ConfigError, match="KV heads"):
        LlamaModelRunner(config, RandomWeights(config), make_mesh(1, "cpu"), spec_of(other, page_size=4, num_pages=4))
    windowed = small_config(components=frozenset({Component.FULL, Component.SWA}), sliding_window=8)
    with pytest.raises(ConfigError, match="one kind of attention"):
        LlamaModelRunner(
            windowed, RandomWeights(windowed), make_mesh(1, "cpu"), spec_of(windowed, page_size=4, num_pages=4)
        )
