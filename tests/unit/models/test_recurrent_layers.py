"""Both recurrent layers against the plain recurrence in float64, whatever the chunks. float32, 2e-5 of the greatest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config.model_config import GatedDeltaShape, StateSpaceScales, StateSpaceShape
from app.models.layers.gated_delta import GatedDeltaNet, GatedDeltaWeights
from app.models.layers.state_space import StateSpace, StateSpaceWeights
from app.models.steps import ExtendRows
from tests.support import recurrent_reference as reference
from tests.support.one_rank import on_one_rank

EMBED = 32
NUM_TOKENS = 256  # of a packed step
LONG = 200  # tokens of one row
NUM_ROWS = 5
DELTA = GatedDeltaShape(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=24, num_taps=4, norm_eps=1e-3)
SPACE = StateSpaceShape(
    num_heads=4,
    head_dim=12,
    num_groups=2,
    state_dim=16,
    num_taps=4,
    norm_eps=1e-3,
    scales=StateSpaceScales(gate=1.2, x=0.8, into=1.3, read=0.7, step=1.1, out=0.9),
)


@dataclass(frozen=True)
class Layer:
    """A layer with weights, compiled when called, and the recurrence that it should equal."""

    arrays: tuple[Any, ...]
    decode: Callable[..., Any]
    extend: Callable[..., Any]  # with chunks of up to NUM_TOKENS
    extend_little: Callable[..., Any]  # with chunks of up to 8, less than a block
    one_row: Callable[..., tuple[np.ndarray, list[np.ndarray]]]

    @cached_property
    def from_nothing(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """The recurrence over `tokens(7, LONG)`."""
        return self.one_row(tokens(7, LONG), [np.zeros(array.shape) for array in self.arrays])


def delta_layer() -> Layer:
    keys, values, heads = 32, 96, 4
    matrices = {"q": keys, "k": keys, "v": values, "z": values, "rate": heads, "step": heads}
    shapes = {name: (width, EMBED) for name, width in matrices.items()}
    shapes |= {"q_conv": (4, keys), "k_conv": (4, keys), "v_conv": (4, values)}
    shapes |= {"step_bias": (2, 2), "log_speed": (2, 2), "norm": (24,), "out": (EMBED, values)}
    weights = reference.random_weights(np.random.default_rng(1), GatedDeltaWeights, shapes)
    net = GatedDeltaNet(DELTA, weights)
    return _layer(net, DELTA.states, lambda x, states: reference.gated_delta(DELTA, weights, x, states))


def space_layer(shape: StateSpaceShape, *optional: str) -> Layer:
    inner, shared, heads = 48, 32, 4
    widths = {"gate": inner, "x": inner, "into": shared, "read": shared, "step": heads}
    shapes: dict[str, tuple[int, ...]] = {name: (width, EMBED) for name, width in widths.items()}
    shapes |= {"x_conv": (4, inner), "into_conv": (4, shared), "read_conv": (4, shared), "out": (EMBED, inner)}
    shapes |= dict.fromkeys(("step_bias", "log_speed", "skip"), (heads,))
    some = {"norm": (inner,), "x_conv_bias": (inner,), "into_conv_bias": (shared,), "read_conv_bias": (shared,)}
    shapes |= {name: some[name] for name in optional}
    weights = reference.random_weights(np.random.default_rng(2), StateSpaceWeights, shapes)
    return _layer(
        StateSpace(shape, weights), shape.states, lambda x, states: reference.state_space(shape, weights, x, states)
    )


def _layer(layer: Any, arrays: tuple[Any, ...], one_row: Callable[..., Any]) -> Layer:
    def extend(max_chunk: int) -> Callable[..., Any]:
        return on_one_rank(lambda x, rows, states: layer.extend(x, rows, max_chunk, states))

    return Layer(arrays, on_one_rank(layer.decode), extend(NUM_TOKENS), extend(8), one_row)


CONV_BIASES = ("x_conv_bias", "into_conv_bias", "read_conv_bias")
LAYERS = {
    "gated delta": delta_layer(),
    "state space": space_layer(SPACE, *CONV_BIASES),
    "state space, gate then norm": space_layer(replace(SPACE, least_step=0.3, greatest_step=0.9), "norm"),
    "state space, norm then gate": space_layer(replace(SPACE, gate_after_norm=True), "norm", *CONV_BIASES),
}
EVERY_LAYER = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())


def assert_near(got: Any, wanted: Any) -> None:
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert np.abs(got - wanted).max() <= 2e-5 * np.abs(wanted).max()


def packed(lengths: list[int], starts: list[int]) -> ExtendRows:
    """Always as many rows, so that a layer compiles once."""
    nothing = [0] * (NUM_ROWS - len(lengths))
    return reference.packed_rows([*lengths, *nothing], [*starts, *nothing])


def tokens(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (count, EMBED)).astype(np.float32)


def states_of(layer: Layer) -> tuple[Any, ...]:
    return reference.random_states(np.random.default_rng(3), layer.arrays, NUM_ROWS)


def row_of(states: Sequence[Any], row: int) -> list[np.ndarray]:
    return [np.array(state)[row] for state in states]


@EVERY_LAYER
def test_packed_chunks_continue_from_each_rows_state(layer: Layer) -> None:
    # Shorter than the convolution, a whole number of blocks, some more, nothing; with gaps between.
    lengths, starts = [2, 128, 70, 0, 1], [0, 2, 140, 255, 255]
    x, states = tokens(4, NUM_TOKENS), states_of(layer)

    out, after = layer.extend(x, packed(lengths, starts), states)

    covered = np.zeros(NUM_TOKENS, bool)
    for row, (length, start) in enumerate(zip(lengths, starts, strict=True)):
        wanted, wanted_states = layer.one_row(x[start : start + length], row_of(states, row))
        if length:
            assert_near(np.asarray(out)[start : start + length], wanted)
            covered[start : start + length] = True
        for got, state in zip(row_of(after, row), wanted_states, strict=True):
            assert_near(got, state)
    assert not np.asarray(out)[~covered].any()


@EVERY_LAYER
def test_chunks_may_be_less_than_a_block(layer: Layer) -> None:
    x, states = tokens(9, 16), states_of(layer)

    out, after = layer.extend_little(x, packed([8, 5], [0, 8]), states)

    for row, (start, end) in enumerate([(0, 8), (8, 13)]):
        wanted, wanted_states = layer.one_row(x[start:end], row_of(states, row))
        assert_near(np.asarray(out)[start:end], wanted)
        for got, state in zip(row_of(after, row), wanted_states, strict=True):
            assert_near(got, state)


@EVERY_LAYER
def test_a_row_without_tokens_keeps_its_state_bit_for_bit(layer: Layer) -> None:
    states = states_of(layer)

    _, after = layer.extend(tokens(5, NUM_TOKENS), packed([0, 9], [0, 0]), states)

    for before, now in zip(row_of(states, 0), row_of(after, 0), strict=True):
        np.testing.assert_array_equal(before, now)


@EVERY_LAYER
def test_decoding_continues_each_row(layer: Layer) -> None:
    x, states = tokens(6, NUM_ROWS), states_of(layer)

    out, after = layer.decode(x, states)

    for row in range(NUM_ROWS):
        wanted, wanted_states = layer.one_row(x[row : row + 1], row_of(states, row))
        assert_near(np.asarray(out)[row], wanted[0])
        for got, state in zip(row_of(after, row), wanted_states, strict=True):
            assert_near(got, state)


@EVERY_LAYER
@settings(max_examples=10, deadline=None)
@given(cuts=st.lists(st.integers(1, LONG - 1), unique=True, max_size=6), decoded=st.integers(0, 5))
def test_the_state_is_the_same_in_whatever_chunks_the_tokens_came(layer: Layer, cuts: list[int], decoded: int) -> None:
    x = tokens(7, LONG)
    states: Any = tuple(np.zeros((NUM_ROWS, *array.shape), np.float32) for array in layer.arrays)
    ends = [*sorted(cut for cut in cuts if cut < LONG - decoded), LONG - decoded]
    done, outs = 0, []
    for end in ends:
        chunk = np.zeros((NUM_TOKENS, EMBED), np.float32)
        chunk[: end - done] = x[done:end]
        out, states = layer.extend(chunk, packed([end - done], [0]), states)
        outs.append(np.asarray(out)[: end - done])
        done = end
    for token in x[done:]:
        out, states = layer.decode(np.tile(token, (NUM_ROWS, 1)), states)
        outs.append(np.asarray(out)[:1])

    wanted, wanted_states = layer.from_nothing
    assert_near(np.concatenate(outs), wanted)
    for got, state in zip(row_of(states, 0), wanted_states, strict=True):
        assert_near(got, state)


@EVERY_LAYER
def test_what_is_not_a_number_in_one_row_stays_there(layer: Layer) -> None:
    x, states = tokens(8, NUM_TOKENS), states_of(layer)
    rows = packed([40, 30], [0, 40])
    clean, clean_states = layer.extend(x, rows, states)

    x[45] = np.nan
    out, after = layer.extend(x, rows, states)

    np.testing.assert_array_equal(np.asarray(out)[:40], np.asarray(clean)[:40])
    for before, now in zip(row_of(clean_states, 0), row_of(after, 0), strict=True):
        np.testing.assert_array_equal(before, now)
    assert np.isnan(np.asarray(out)[45:70]).any()
