"""The driver over a flat pool computes what the unrolled one does, with every attention and layout. 1e-5."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
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
from tests.support.compiling import compiled_programs
from tests.support.llama_rig import Rows, open_llama, small_config, spec_of
from tests.support.ragged_reference import ragged_reference

TOKENS = np.random.default_rng(7).integers(0, 101, (2, 24)).astype(np.int32)
NUM_PAGES = 20
EVERY_PAGE = np.arange(NUM_PAGES + 1, dtype=np.int32)


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


FIELDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "qk_norm": True, "tie_word_embeddings": True},
    "experts": {"experts": ExpertsConfig(num_experts=4, experts_per_token=2, intermediate_size=24)},
}
# Attention, padding of the pool, and how layers follow one another.
DRIVERS: dict[str, tuple[Callable[[PoolSpec], FlatAttention], dict[str, int], LayerRun]] = {
    "gather": (GatherAttention, {}, LoopOverLayers()),
    "gather_in_a_row": (GatherAttention, {}, LayersInARow()),
    "ragged": (ragged, {}, LoopOverLayers()),
    "ragged_padded_in_a_row": (ragged, {"extra_kv_heads": 2, "extra_head_dim": 8}, LayersInARow()),
}
# The plain model with each driver; each kind of layer with both attentions and both orders. The rest compiles longest.
OFTEN = ("gather", "ragged_padded_in_a_row")
PAIRS = [
    pytest.param(kind, driver, marks=() if kind == "plain" or driver in OFTEN else pytest.mark.slow)
    for kind in FIELDS
    for driver in DRIVERS
]


@pytest.mark.parametrize(("attention_of", "num_programs"), [(ragged, 1), (GatherAttention, 2)])
def test_only_programs_that_differ_are_compiled_for_different_chunks(attention_of: Any, num_programs: int) -> None:
    config = small_config()
    runner, pool = open_looped(
        config, spec_of(config, page_size=4, num_pages=NUM_PAGES), attention_of, LoopOverLayers()
    )
    rows = Rows(runner, pool, num_rows=2, num_pages=8)
    with compiled_programs() as compiled:
        for max_chunk in (16, 32):
            rows.extend([0], [TOKENS[0, :9]], [0], num_tokens=32, max_chunk=max_chunk)
    assert compiled.count("jit(_extend)") == num_programs


@cache
def unrolled(kind: str) -> tuple[list[np.ndarray], np.ndarray]:
    """-> the logits of a conversation, and what all pages hold after it."""
    config = small_config(**FIELDS[kind])
    runner, pool = open_llama(config, spec_of(config, page_size=4, num_pages=NUM_PAGES))
    logits = conversation(Rows(runner, pool, num_rows=2, num_pages=8))
    return logits, pool.page_contents(EVERY_PAGE)


@pytest.mark.parametrize(("kind", "driver"), PAIRS)
def test_logits_and_pages_equal_those_of_the_unrolled_driver(kind: str, driver: str) -> None:
    config = small_config(**FIELDS[kind])
    attention_of, padding, layer_run = DRIVERS[driver]
    spec = replace(spec_of(config, page_size=4, num_pages=NUM_PAGES), **padding)
    runner, pool = open_looped(config, spec, attention_of, layer_run)

    found = conversation(Rows(runner, pool, num_rows=2, num_pages=8))

    expected, pages = unrolled(kind)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)
    contents = pool.page_contents(EVERY_PAGE)
    np.testing.assert_allclose(contents, pages, atol=1e-5)
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
