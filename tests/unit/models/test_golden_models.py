"""Every family against logits of an independent implementation, through the pools. float32.

The measure is max |difference| over the greatest |logit| of the model; at most 2e-5, and mostly below 1e-6.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from app.config.model_config import Component
from app.errors import ConfigError
from app.models.decoder_programs import DecoderPrograms
from app.models.families.table import num_parameters, weight_bytes
from app.models.model_runner import HybridModelRunner
from app.models.random_weights import RandomWeights
from app.tpu.mesh import DATA_AXIS, TENSOR_AXIS, make_mesh
from tests.support.family_tp_check import SIZES
from tests.support.forced_devices import run_on_eight_devices
from tests.support.golden_models import golden_model, served_goldens
from tests.support.hybrid_rig import HybridRows, hybrid_spec, open_hybrid

TOLERANCE = 2e-5
SERVED = served_goldens()
WITH_WINDOWS = [name for name in SERVED if golden_model(name).config.sliding_window]
NUM_TOKENS = 64  # of the longest step

# Both sequences, in chunks that share steps. Windows have 12, 16 and 20 tokens: there are chunks shorter than a window
# and a page, as long, longer, and of a single token. What is left is decoded, both rows beside one another.
CHUNKS = ((16, 7), (1, 20), (24, 13), (20, 0))


def assert_close(found: np.ndarray, expected: np.ndarray, greatest: float) -> None:
    assert np.abs(found - expected).max() <= TOLERANCE * greatest


def open_rows(name: str, page_size: int) -> HybridRows:
    model = golden_model(name)
    num_pages = -(-96 // page_size)
    spec = hybrid_spec(model.config, page_size=page_size, num_pages=2 * num_pages, num_rows=2)
    runner = open_hybrid(model.config, model.source(), spec)
    return HybridRows(runner, model.config, spec, make_mesh(1, "cpu"), num_rows=2, num_pages=num_pages)


# One for each kind of layer; the others only compile longer.
OFTEN = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "qwen3_next", "falcon_h1")
SMALL = [pytest.param(name, 16, id=f"{name}-16", marks=() if name in OFTEN else pytest.mark.slow) for name in SERVED]
OTHERS = [
    pytest.param(name, page_size, id=f"{name}-{page_size}", marks=() if name == "gemma3_text" else pytest.mark.slow)
    for name in WITH_WINDOWS
    for page_size in (1, 64)
]


@pytest.mark.parametrize(("name", "page_size"), SMALL + OTHERS)
def test_chunks_and_single_tokens_give_the_golden_logits(name: str, page_size: int) -> None:
    model, rows = golden_model(name), open_rows(name, page_size)
    greatest = max(np.abs(logits).max() for logits in model.logits)

    done = [0, 0]
    for lengths in CHUNKS:
        own = [row for row in (0, 1) if lengths[row]]
        chunks = [model.sequences[row][done[row] : done[row] + lengths[row]] for row in own]
        logits = rows.extend(own, chunks, [done[row] for row in own], num_tokens=NUM_TOKENS)
        done = [count + length for count, length in zip(done, lengths, strict=True)]
        for row, found in zip(own, logits, strict=True):
            assert_close(found, model.logits[row][done[row] - 1], greatest)

    for position in range(5):
        at = [done[row] + position for row in (0, 1)]
        tokens = [int(model.sequences[row][at[row]]) for row in (0, 1)]
        logits = rows.decode([0, 1], tokens, [index + 1 for index in at])
        for row, found in enumerate(logits):
            assert_close(found, model.logits[row][at[row]], greatest)


def test_latents_may_be_stored_wider_than_they_are() -> None:
    model = golden_model("deepseek_v3")
    spec = hybrid_spec(model.config, page_size=16, num_pages=4)
    assert spec.full is not None
    wide = replace(spec, full=replace(spec.full, extra_head_dim=88))
    rows = HybridRows(
        open_hybrid(model.config, model.source(), wide),
        model.config,
        wide,
        make_mesh(1, "cpu"),
        num_rows=1,
        num_pages=4,
    )

    extended = rows.extend([0], [model.sequences[0][:30]], [0], num_tokens=32)
    decoded = rows.decode([0], [int(model.sequences[0][30])], [31])

    assert rows.buffers.full.keys[0].shape[-1] == 128
    greatest = np.abs(model.logits[0]).max()
    assert_close(np.concatenate([extended, decoded]), model.logits[0][29:31], greatest)


@pytest.mark.parametrize("name", SERVED)
def test_random_weights_are_of_the_checkpoints_shapes(name: str) -> None:
    model = golden_model(name)
    source = RandomWeights(model.config)

    assert {tensor: list(source.tensor(tensor).shape) for tensor in source.names} == model.shapes


def test_a_recurrent_layer_is_not_cut_within_a_head() -> None:
    config = golden_model("qwen3_next").config
    spec = hybrid_spec(config, page_size=16, num_pages=4, tp_size=4)
    mesh = AbstractMesh((1, 4), (DATA_AXIS, TENSOR_AXIS))

    with pytest.raises(ConfigError, match="2, the heads axis"):
        DecoderPrograms(config, mesh, spec, "float32")


@pytest.mark.parametrize("name", SERVED)
def test_every_tensor_of_a_checkpoint_is_read_and_counted(name: str) -> None:
    model = golden_model(name)
    spec = hybrid_spec(model.config, page_size=16, num_pages=4)
    source = model.source()

    DecoderPrograms(model.config, make_mesh(1, "cpu"), spec, "float32").load(source, lambda *_: None)

    assert source.asked == set(model.shapes)
    assert num_parameters(model.config) == sum(int(np.prod(shape)) for shape in model.shapes.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", SERVED)
def test_the_bytes_of_all_weights_are_known_before_they_are_loaded(name: str, dtype: str) -> None:
    """Also where some of them, the decays of recurrent layers, keep a dtype of their own."""
    model = golden_model(name)
    programs = DecoderPrograms(
        model.config, make_mesh(1, "cpu"), hybrid_spec(model.config, page_size=16, num_pages=4), dtype
    )

    loaded = programs.load(model.source(), lambda *_: None)

    arrays = {array.unsafe_buffer_pointer(): array.nbytes for array in jax.tree.leaves(loaded)}  # a tied head is one
    assert weight_bytes(model.config, dtype) == sum(arrays.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss"])
def test_a_step_writes_every_pool_in_place(name: str) -> None:
    model, rows = golden_model(name), open_rows(name, 16)

    def places(buffers: Any) -> list[int]:
        return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(buffers)]

    rows.extend([0], [model.sequences[0][:20]], [0], num_tokens=NUM_TOKENS)
    before = rows.buffers
    held = places(before)
    rows.decode([0], [5], [20])  # still within the first window: the rig poisons nothing

    assert all(array.is_deleted() for array in jax.tree.leaves(before.full))
    assert places(rows.buffers.full) == held[: len(jax.tree.leaves(before.full))]


def test_pools_that_are_not_the_models_are_refused() -> None:
    config = golden_model("gemma2").config
    spec = hybrid_spec(config, page_size=16, num_pages=4)
    mesh = make_mesh(1, "cpu")
    windowless = hybrid_spec(golden_model("llama").config, page_size=16, num_pages=4)

    assert config.components == {Component.FULL, Component.SWA}
    for wrong, field in (
        (windowless, "window_pool_spec"),
        (type(spec)(full=None, window=spec.window), "pool_spec"),
        (type(spec)(full=spec.window, window=windowless.full), "window_pool_spec"),
    ):
        with pytest.raises(ConfigError) as caught:
            HybridModelRunner(config, golden_model("gemma2").source(), mesh, wrong)
        assert caught.value.field == field


def test_chunks_cover_the_sequences() -> None:
    for row, sequence in enumerate(golden_model("llama").sequences):
        (*_, total) = accumulate(chunk[row] for chunk in CHUNKS)
        assert total + 5 <= sequence.size


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_model_cut_over_devices_is_the_same_model(name: str) -> None:
    model = golden_model(name)
    greatest = np.abs(model.logits[0]).max()

    found = run_on_eight_devices("tests.support.family_tp_check", name)

    assert list(found) == [str(size) for size in SIZES[name]]
    for logits in found.values():
        assert_close(np.array(logits), model.logits[0][[29, 30]], greatest)
