"""The driver over a flat pool computes what the unrolled one does, with every attention and layout. 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from app.config.model_config import Component, ExpertsConfig, ModelConfig
from app.core.ports import PoolSpec
from app.errors import ConfigError, OwnershipError, RuntimeClosedError
from app.models.flat_programs import FlatPrograms
from app.models.flat_runner import FlatModelRunner
from app.models.layer_runs import LayerRun, LayersInARow, LoopOverLayers
from app.models.layers.flat_attention import FlatAttention
from app.models.layers.gather_attention import GatherAttention
from app.models.layers.ragged_attention import RaggedAttention
from app.models.random_weights import RandomWeights
from app.tpu.kv_pool import MHATokenToKVPool
from app.tpu.mesh import make_mesh
from tests.support.llama_rig import Rows, open_llama, small_config, spec_of
from tests.support.ragged_reference import ragged_reference

TOKENS = np.random.default_rng(7).integers(0, 101, (2, 24)).astype(np.int32)
NUM_PAGES = 20


def ragged(spec: PoolSpec) -> FlatAttention:
    return RaggedAttention(spec, 1, ragged_reference)


def open_looped(
    config: ModelConfig,
    spec: PoolSpec,
    attention_of: Callable[[PoolSpec], FlatAttention],
    layer_run: LayerRun,
) -> tuple[FlatModelRunner, MHATokenToKVPool]:
    mesh = make_mesh(1, "cpu")
    attention = attention_of(spec)
    programs = FlatPrograms(config, mesh, spec, attention, layer_run, "float32")
    runner = FlatModelRunner(config, RandomWeights(config), programs)
    runner.load()
    pool = MHATokenToKVPool(spec, mesh, attention.layout)
    pool.open()
    return runner, pool


def conversation(rows: Rows) -> list[np.ndarray]:
    """Two prompts, one of them in two chunks, then both decode beside one another. -> the logits of every call."""
    return [
        rows.extend([0, 1], [TOKENS[0, :9], TOKENS[1, :5]], [0, 0], num_tokens=16, max_chunk=16),
        rows.extend([0], [TOKENS[0, 9:20]], [9], num_tokens=16, max_chunk=16),
        rows.decode([0, 1], [int(TOKENS[0, 20]), int(TOKENS[1, 5])], [21, 6]),
        rows.decode([1], [int(TOKENS[1, 6])], [7]),
    ]


@pytest.mark.parametrize(
    ("attention_of", "padding", "layer_run"),
    [
        pytest.param(GatherAttention, {}, LoopOverLayers(), id="gather"),
        pytest.param(GatherAttention, {}, LayersInARow(), id="gather_in_a_row"),
        pytest.param(ragged, {}, LoopOverLayers(), id="ragged"),
        pytest.param(ragged, {"extra_kv_heads": 2, "extra_head_dim": 8}, LayersInARow(), id="ragged_padded_in_a_row"),
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"attention_bias": True, "qk_norm": True, "tie_word_embeddings": True},
        {"experts": ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=24)},
    ],
    ids=["plain", "biases", "experts"],
)
def test_logits_and_pages_equal_those_of_the_unrolled_driver(
    attention_of: Callable[[PoolSpec], FlatAttention],
    padding: dict[str, int],
    layer_run: LayerRun,
    fields: dict[str, Any],
) -> None:
    config = small_config(**fields)
    spec = spec_of(config, page_size=4, num_pages=NUM_PAGES)
    unrolled = Rows(*open_llama(config, spec), num_rows=2, num_pages=8)
    runner, pool = open_looped(config, replace(spec, **padding), attention_of, layer_run)
    looped = Rows(runner, pool, num_rows=2, num_pages=8)

    expected, found = conversation(unrolled), conversation(looped)

    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)
    everything = np.arange(NUM_PAGES + 1, dtype=np.int32)
    contents = pool.page_contents(everything)
    np.testing.assert_allclose(contents, unrolled._pool.page_contents(everything), atol=1e-5)
    assert not contents[:, :, 0].any()  # the padding page of every layer


@pytest.mark.parametrize(("attention_of", "layer_run"), [(GatherAttention, LayersInARow()), (ragged, LoopOverLayers())])
def test_a_step_writes_the_pool_in_place(
    attention_of: Callable[[PoolSpec], FlatAttention], layer_run: LayerRun
) -> None:
    config = small_config()
    runner, pool = open_looped(config, spec_of(config, page_size=4, num_pages=NUM_PAGES), attention_of, layer_run)
    rows = Rows(runner, pool, num_rows=2, num_pages=8)
    before = pool.take()
    place = before.pages.unsafe_buffer_pointer()
    pool.put(before)

    rows.extend([0], [TOKENS[0, :9]], [0], num_tokens=16, max_chunk=16)
    rows.decode([0], [5], [10])

    after = pool.take()
    assert before.pages.is_deleted()
    assert after.pages.unsafe_buffer_pointer() == place
    with pytest.raises(OwnershipError):
        pool.take()


def test_the_runner_is_of_no_use_without_its_weights() -> None:
    config = small_config()
    runner, pool = open_looped(
        config, spec_of(config, page_size=4, num_pages=NUM_PAGES), GatherAttention, LoopOverLayers()
    )
    runner.close()

    with pytest.raises(RuntimeClosedError):
        Rows(runner, pool, num_rows=2, num_pages=8).decode([0], [5], [1])


def test_a_pool_of_another_model_is_refused() -> None:
    config = small_config()
    spec = spec_of(small_config(num_layers=3), page_size=4, num_pages=NUM_PAGES)

    with pytest.raises(ConfigError, match="pool_spec"):
        FlatPrograms(config, make_mesh(1, "cpu"), spec, GatherAttention(spec), LoopOverLayers(), "float32")


@pytest.mark.parametrize(
    "fields",
    [
        {"components": frozenset({Component.SWA}), "sliding_window": 8},
        {"attention_sinks": True},
        {
            "experts": ExpertsConfig(
                num_experts=4, experts_per_token=2, intermediate_size=24, dense_layers=frozenset({0})
            )
        },
    ],
    ids=["windows", "sinks", "unlike layers"],
)
def test_a_model_that_one_loop_over_one_pool_does_not_compute_is_refused(fields: dict[str, Any]) -> None:
    config = small_config(**fields)
    spec = spec_of(config, page_size=4, num_pages=NUM_PAGES)

    with pytest.raises(ConfigError, match="all alike"):
        FlatPrograms(config, make_mesh(1, "cpu"), spec, GatherAttention(spec), LoopOverLayers(), "float32")


@pytest.mark.parametrize("layer_run", [LoopOverLayers(), LayersInARow()])
def test_loading_tells_how_far_it_is(layer_run: LayerRun) -> None:
    config = small_config()
    spec = spec_of(config, page_size=4, num_pages=NUM_PAGES)
    programs = FlatPrograms(config, make_mesh(1, "cpu"), spec, GatherAttention(spec), layer_run, "float32")
    told: list[tuple[str, float]] = []

    FlatModelRunner(config, RandomWeights(config), programs, lambda *event: told.append(event)).load()

    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert told[-1] == ("weights", 1.0)
