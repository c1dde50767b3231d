"""Recurrent layers token by token in numpy's float64, for tests: as the papers write them, with nothing in parallel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np

from app.config.model_config import GatedDeltaShape, StateArray, StateSpaceShape
from app.models.layers.gated_delta import GatedDeltaWeights
from app.models.layers.state_space import StateSpaceWeights
from app.models.steps import ExtendRows

Arrays = list[np.ndarray]
Weights = TypeVar("Weights", GatedDeltaWeights, StateSpaceWeights)


def gated_delta(
    shape: GatedDeltaShape, weights: GatedDeltaWeights, x: np.ndarray, states: Sequence[np.ndarray]
) -> tuple[np.ndarray, Arrays]:
    """(n, embed) of one row -> (n, embed), the states after it."""
    w, x = _wide(weights), x.astype(np.float64)
    *seen, matrices = (state.astype(np.float64) for state in states)
    group = shape.num_value_heads // shape.num_key_heads
    out = []
    for token in x:
        q, k, v = (
            _convolved(seen, index, matrix @ token, taps, None)
            for index, (matrix, taps) in enumerate([(w.q, w.q_conv), (w.k, w.k_conv), (w.v, w.v_conv)])
        )
        q, k = (vectors.reshape(shape.num_key_heads, shape.key_dim) for vectors in (q, k))
        v = v.reshape(shape.num_value_heads, shape.value_dim)
        found = np.zeros_like(v)
        for head in range(shape.num_value_heads):
            unit_q, unit_k = (vectors[head // group] / _length(vectors[head // group]) for vectors in (q, k))
            rate = _sigmoid(w.rate[head] @ token)
            own = divmod(head, group)
            decay = math.exp(-math.exp(w.log_speed[own]) * _softplus(w.step[head] @ token + w.step_bias[own]))
            matrices[head] *= decay
            matrices[head] += np.outer(unit_k, rate * (v[head] - unit_k @ matrices[head]))
            found[head] = unit_q @ matrices[head] / math.sqrt(shape.key_dim)
        mean = (found**2).mean(axis=-1, keepdims=True)
        normed = (found / np.sqrt(mean + shape.norm_eps) * w.norm).reshape(-1)
        out.append(w.out @ (normed * _silu(w.z @ token)))
    return np.array(out).reshape(x.shape), [*seen, matrices]


def state_space(
    shape: StateSpaceShape, weights: StateSpaceWeights, x: np.ndarray, states: Sequence[np.ndarray]
) -> tuple[np.ndarray, Arrays]:
    """(n, embed) of one row -> (n, embed), the states after it."""
    w, x, scales = _wide(weights), x.astype(np.float64), shape.scales
    *seen, matrices = (state.astype(np.float64) for state in states)
    group = shape.num_heads // shape.num_groups
    out = []
    for token in x:
        inputs = [
            (w.x @ token * scales.x, w.x_conv, w.x_conv_bias),
            (w.into @ token * scales.into, w.into_conv, w.into_conv_bias),
            (w.read @ token * scales.read, w.read_conv, w.read_conv_bias),
        ]
        inner, into, read = (_convolved(seen, index, *parts) for index, parts in enumerate(inputs))
        inner = inner.reshape(shape.num_heads, shape.head_dim)
        into, read = (shared.reshape(shape.num_groups, shape.state_dim) for shared in (into, read))
        steps = w.step @ token * scales.step + w.step_bias
        found = np.zeros_like(inner)
        for head in range(shape.num_heads):
            step = min(max(_softplus(steps[head]), shape.least_step), shape.greatest_step)
            matrices[head] *= math.exp(-step * math.exp(w.log_speed[head]))
            matrices[head] += step * np.outer(inner[head], into[head // group])
            found[head] = matrices[head] @ read[head // group] + w.skip[head] * inner[head]
        gate = _silu(w.gate @ token * scales.gate).reshape(found.shape)
        before = found if w.norm is None or shape.gate_after_norm else found * gate
        normed = before if w.norm is None else _group_normed(before, w.norm, shape)
        gated = normed * gate if w.norm is None or shape.gate_after_norm else normed
        out.append(w.out @ gated.reshape(-1) * scales.out)
    return np.array(out).reshape(x.shape), [*seen, matrices]


def random_weights(rng: np.random.Generator, like: type[Weights], shapes: dict[str, tuple[int, ...]]) -> Weights:
    """float32, at a scale at which every part of the layer shows; heads decay from slowly to fast."""

    def draw(name: str, shape: tuple[int, ...]) -> jnp.ndarray:
        if name == "log_speed":
            slow_to_fast = np.linspace(math.log(1e-3), math.log(16), math.prod(shape))
            return jnp.asarray(slow_to_fast.reshape(shape), jnp.float32)
        spread = shape[-1] ** -0.5 if len(shape) > 1 and "conv" not in name else 0.5
        return jnp.asarray(rng.normal(1 if name in ("norm", "skip") else 0, spread, shape), jnp.float32)

    return like(**{name: draw(name, shape) for name, shape in shapes.items()})


def random_states(rng: np.random.Generator, arrays: Sequence[StateArray], num_rows: int) -> tuple[np.ndarray, ...]:
    return tuple(rng.normal(0, 0.5, (num_rows, *array.shape)).astype(np.float32) for array in arrays)


def packed_rows(lengths: Sequence[int], starts: Sequence[int]) -> ExtendRows:
    """What a recurrent layer reads of a step's rows; the rest it must not need."""
    unread: Any = np.zeros((len(lengths), 0), np.int32)
    starts_array: Any = np.array(starts, np.int32)
    lengths_array: Any = np.array(lengths, np.int32)
    return ExtendRows(starts_array, lengths_array, np.zeros_like(lengths_array), unread)


def _wide(weights: Any) -> Any:
    arrays = weights._asdict()
    return type(weights)(**{name: a if a is None else np.asarray(a, np.float64) for name, a in arrays.items()})


def _convolved(seen: Arrays, index: int, new: np.ndarray, taps: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Puts the token into what convolution `index` has seen."""
    window = np.concatenate([seen[index], new[None]])
    seen[index] = window[1:]
    found = (window * taps).sum(axis=0)
    return _silu(found if bias is None else found + bias)


def _group_normed(heads: np.ndarray, weight: np.ndarray, shape: StateSpaceShape) -> np.ndarray:
    groups = heads.reshape(shape.num_groups, -1)
    normed = groups / np.sqrt((groups**2).mean(axis=-1, keepdims=True) + shape.norm_eps)
    return (normed.reshape(-1) * weight).reshape(heads.shape)


def _length(vector: np.ndarray) -> float:
    return math.sqrt(vector @ vector + 1e-6)


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def _softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))
