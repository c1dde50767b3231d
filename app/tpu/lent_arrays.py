"""Device arrays with one owner that lends them for one dispatch at a time.

take() --> buffers --> a program that donates them --> put(replacements)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import jax
import jax.numpy as jnp

from app.errors import OwnershipError, RuntimeClosedError


class LentArrays(ABC):
    """Owner of the arrays of a pool.

    Invariant: between `open` and `close` the arrays are either here or lent out by `take`. Whoever takes them donates
    them and puts the replacements. When the device fails meanwhile, nothing is left to put: then `reset`.
    Not thread-safe: one thread dispatches.
    """

    def __init__(self) -> None:
        self._open = False
        self._buffers: Any = None

    @abstractmethod
    def abstract_buffers(self) -> Any:
        """The arrays as shapes, types and shardings, in the structure in which programs take them."""

    def open(self) -> None:
        """Allocate every array, zeroed. Idempotent."""
        if self._open:
            return
        self._buffers = zeros(self.abstract_buffers())
        self._open = True

    def close(self) -> None:
        """Drop the arrays. Idempotent."""
        self._buffers = None
        self._open = False

    def reset(self) -> None:
        """Whatever became of the arrays, hold new ones, zeroed: all content is gone."""
        self.close()
        self.open()

    def lost(self) -> bool:
        """Whether an open pool has no usable arrays: taken and never put, or dead after a dispatch that failed."""
        if not self._open:
            return False
        return self._buffers is None or any(array.is_deleted() for array in jax.tree.leaves(self._buffers))

    def take(self) -> Any:
        """Lend the arrays for one dispatch, which should donate them.

        Raises OwnershipError when they are lent out already, RuntimeClosedError when the pool is closed.
        """
        if not self._open:
            raise RuntimeClosedError(action="take the KV buffers")
        if self._buffers is None:
            raise OwnershipError(what="KV buffers", reason="taken already: put the replacements first, or reset")
        taken, self._buffers = self._buffers, None
        return taken

    def put(self, buffers: Any) -> None:
        """Hold what a dispatch returned for the arrays it took. Raises OwnershipError when none were taken."""
        if not self._open:
            raise RuntimeClosedError(action="put KV buffers")
        if self._buffers is not None:
            raise OwnershipError(what="KV buffers", reason="put without a take: these would replace live arrays")
        self._buffers = buffers


def zeros(abstract: Any) -> Any:
    """Arrays of these shapes, types and shardings, on their devices."""
    return jax.tree.map(lambda array: jnp.zeros(array.shape, array.dtype, device=array.sharding), abstract)
