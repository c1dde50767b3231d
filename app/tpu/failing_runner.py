"""A model on a device that fails once, for tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from app.core.ports import DecodeInputs, ExtendInputs, ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFailure:
    """Which step fails, counted from 0 over decode and extend calls together, and where it is noticed.

    at_dispatch: the call raises. Otherwise the call returns and its arrays raise when they are read, as a device that
    fails while it runs does. The lent arrays are consumed either way.
    """

    step: int
    at_dispatch: bool


class FailingRunner:
    """Another ModelRunner, one step of which fails."""

    def __init__(self, inner: ModelRunner, failure: InjectedFailure) -> None:
        self._inner = inner
        self._failure = failure
        self._steps = 0

    @property
    def vocab_size(self) -> int:
        return self._inner.vocab_size

    def load(self) -> None:
        self._inner.load()

    def close(self) -> None:
        self._inner.close()

    def decode(self, buffers: Any, inputs: DecodeInputs) -> tuple[Any, Any]:
        return self._step(self._inner.decode, buffers, inputs)

    def extend(self, buffers: Any, inputs: ExtendInputs) -> tuple[Any, Any]:
        return self._step(self._inner.extend, buffers, inputs)

    def _step(self, call: Callable[[Any, Any], tuple[Any, Any]], buffers: Any, inputs: Any) -> tuple[Any, Any]:
        fails = self._steps == self._failure.step
        self._steps += 1
        if fails and self._failure.at_dispatch:
            for array in jax.tree.leaves(buffers):
                array.delete()
            raise RuntimeError("injected failure at dispatch")
        buffers, logits = call(buffers, inputs)
        return _failing(buffers, logits) if fails else (buffers, logits)


def _failing(buffers: Any, logits: Any) -> tuple[Any, Any]:
    """The same arrays, donated to a program that fails once it runs, which is after this has returned."""
    zero = jnp.float32(0)
    program = _run_out_of_memory.lower((buffers, logits), zero).compile()  # before `_busy` starts the clock
    return program((buffers, logits), _busy(zero))


@jax.jit
def _busy(seed: jax.Array) -> jax.Array:
    """`seed`, which must be 0, after a tenth of a second or more: time to dispatch what follows the failing program."""
    square = jnp.full((256, 256), seed)
    return jax.lax.fori_loop(0, 500, lambda _, held: held @ held, square)[0, 0]


@partial(jax.jit, donate_argnums=0)
def _run_out_of_memory(arrays: tuple[Any, Any], zero: jax.Array) -> tuple[Any, Any]:
    """`arrays`, were there 2**60 bytes to compute them with."""
    huge = jax.lax.sort(jax.lax.iota(jnp.uint8, 2**60) * zero.astype(jnp.uint8))
    return jax.tree.map(lambda array: array + huge[-1].astype(array.dtype), arrays)
