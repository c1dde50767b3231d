"""What the step of layers with arrays of their own does with recurrent states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from app.config.model_config import Component
from app.models.array_step import decode_step, extend_step
from app.models.decoder import Kept
from app.models.steps import ExtendRows

NOTHING: Mapping[Any, Any] = {}
RECURRENT = Component.RECURRENT.value


class Sums:
    """A Recurrence whose state is the sum of a row's tokens, and which gives back that sum and the tokens' count."""

    def decode(self, x: Any, states: Any) -> Any:
        total = states[0] + x
        return total, (total, states[1] + 1)

    def extend(self, x: Any, rows: ExtendRows, max_chunk: int, states: Any) -> Any:
        index = jnp.arange(x.shape[0])
        ends = rows.chunk_starts + rows.chunk_lengths
        own = ((index >= rows.chunk_starts[:, None]) & (index < ends[:, None])).astype(x.dtype)
        total = states[0] + own @ x
        return own.T @ total, (total, states[1] + rows.chunk_lengths[:, None].astype(x.dtype))


def held() -> Kept:
    """Five slots, each filled with its own number."""
    slots = jnp.arange(5.0)[:, None]
    return {RECURRENT: (jnp.broadcast_to(slots, (5, 2)), slots)}


def test_a_decode_reads_and_replaces_the_states_of_its_rows_alone() -> None:
    step = decode_step(NOTHING, NOTHING, jnp.array([4, 5, 2], jnp.int32))  # the one in the middle is padding

    out, kept = step.recur(Sums(), jnp.array([[10.0, 20.0], [np.nan, np.nan], [1.0, 2.0]]), held())

    np.testing.assert_array_equal(out[jnp.array([0, 2])], [[14, 24], [3, 4]])
    totals, counts = kept[RECURRENT]
    np.testing.assert_array_equal(totals, [[0, 0], [1, 1], [3, 4], [3, 3], [14, 24]])
    np.testing.assert_array_equal(counts, [[0], [1], [3], [3], [5]])


def test_an_extend_runs_each_chunk_from_its_rows_state() -> None:
    rows = ExtendRows(*(jnp.array(n, jnp.int32) for n in ([0, 2, 0], [2, 1, 0], [0, 0, 0], [[0], [0], [0]])))
    step = extend_step(NOTHING, NOTHING, jnp.array([3, 1, 99], jnp.int32), rows, 4)

    out, kept = step.recur(Sums(), jnp.array([[1.0, 1.0], [2.0, 2.0], [5.0, 6.0], [7.0, 7.0]]), held())

    np.testing.assert_array_equal(out, [[6, 6], [6, 6], [6, 7], [0, 0]])
    totals, counts = kept[RECURRENT]
    np.testing.assert_array_equal(totals, [[0, 0], [6, 7], [2, 2], [6, 6], [4, 4]])
    np.testing.assert_array_equal(counts, [[0], [2], [2], [5], [4]])
