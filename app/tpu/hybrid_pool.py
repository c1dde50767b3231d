"""The device pool of a model whose layers keep different things: full pages, window pages, recurrent states."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from app.core.ports import PoolSpec
from app.tpu.hybrid_buffers import HybridBuffers, LayerStates
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.lent_arrays import LentArrays
from app.tpu.mesh import num_nodes_of
from app.tpu.program import Program, from_host

_SMALLEST_COPY = 2  # programs for few sizes


class HybridKVPool(LentArrays):
    """Owner of HybridBuffers. Full pages and window pages are numbered apart; page 0 of each is padding.

    Memory: (num_pages + 1) * page_bytes of each kind and num_slots * slot_bytes, over all ranks.
    """

    def __init__(self, spec: PoolSpec, hybrid_spec: HybridSpec, mesh: Mesh) -> None:
        """spec: of full pages, also where no layer has any and they only name places."""
        super().__init__()
        self._mesh = mesh
        self._hybrid_spec = hybrid_spec
        self.spec = spec

    @property
    def num_nodes(self) -> int:
        """Processes that hold a share of the arrays."""
        return num_nodes_of(self._mesh)

    def abstract_buffers(self) -> HybridBuffers:
        return self._hybrid_spec.abstract(self._mesh)

    def copy_states(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Dispatch a copy of states between slots, (n,) int32 each; targets are distinct and none is a source."""
        if not targets.size:
            return
        size = max(_SMALLEST_COPY, 1 << (targets.size - 1).bit_length())
        moves = np.zeros((2, size), np.int32)
        moves[1] = np.iinfo(np.int32).max  # padding: written nowhere
        moves[:, : targets.size] = sources, targets
        buffers: HybridBuffers = self.take()
        self.put(buffers._replace(states=_copy(buffers.states, moves)))

    def page_contents(self, pages: np.ndarray) -> list[np.ndarray]:
        """(n,) int32 full pages -> each array's (n, page_size, width), as stored. A copy, for tests and checks."""
        return self._contents(lambda buffers: buffers.full, pages)

    def window_contents(self, pages: np.ndarray) -> list[np.ndarray]:
        """The same for window pages."""
        return self._contents(lambda buffers: buffers.window, pages)

    def state_contents(self, slots: np.ndarray) -> list[np.ndarray]:
        """(n,) int32 slots -> each array's (n, *shape)."""
        return self._contents(lambda buffers: buffers.states, slots)

    def _contents(self, kind: Any, index: np.ndarray) -> list[np.ndarray]:
        buffers = self.take()
        self.put(buffers)
        return [np.asarray(array)[index] for array in jax.tree.leaves(kind(buffers))]


@partial(jax.jit, donate_argnums=0)
def _copy(states: tuple[LayerStates, ...], moves: jax.Array) -> tuple[LayerStates, ...]:
    """Each array's slots moves[0] -> slots moves[1]; a target beyond the last slot is dropped."""
    return jax.tree.map(lambda array: array.at[moves[1]].set(array[moves[0]], mode="drop"), states)


def state_copy_programs(states: tuple[LayerStates, ...], num_states: int) -> list[Program]:
    """What `copy_states` dispatches for so many states, a power of two; `states` as shapes."""
    moves = from_host((2, num_states), np.int32)
    return [Program(name="state_copy", function=_copy, arguments=(states, moves), donated=(states,))]
