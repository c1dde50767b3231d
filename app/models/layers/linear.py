"""Matrix products with weights as Hugging Face stores them, (out, in): nothing is transposed on loading."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from app.tpu.mesh import TENSOR_AXIS

FEW_TOKENS = 64  # up to here the CPU backend is quicker with the matrix on the left; from 128 on it is slower


def linear(x: jax.Array, matrix: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """(T, in) by (out, in) -> (T, out)."""
    result = product(x, matrix, x.dtype)
    return result if bias is None else result + bias


def product(x: jax.Array, matrix: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """(T, in) by (out, in) -> (T, out) of type `dtype`."""
    if x.shape[0] > FEW_TOKENS:
        return _rows_first(x, matrix, dtype)
    return jax.lax.platform_dependent(
        x, matrix, cpu=partial(_matrix_first, dtype=dtype), default=partial(_rows_first, dtype=dtype)
    )


def summed(share: jax.Array) -> jax.Array:
    """The sum over ranks. XLA's CPU backend would keep the all-reduce of one rank, at the cost of fusing around it."""
    return share if jax.lax.axis_size(TENSOR_AXIS) == 1 else jax.lax.psum(share, TENSOR_AXIS)


def once(value: jax.Array) -> jax.Array:
    """What every rank holds, as shares whose sum it is: for a bias of a product that is summed over ranks."""
    if jax.lax.axis_size(TENSOR_AXIS) == 1:
        return value
    return jnp.where(jax.lax.axis_index(TENSOR_AXIS) == 0, value, jnp.zeros_like(value))


def _rows_first(x: jax.Array, matrix: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.einsum("ti,oi->to", x, matrix, preferred_element_type=dtype)


def _matrix_first(x: jax.Array, matrix: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The same with the large operand on the left, which XLA's CPU backend reads up to twice as fast for few tokens.

    The barrier keeps XLA from folding the transpose away, and the order of the operands with it.
    """
    result = jnp.einsum("oi,ti->ot", matrix, x, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(result).T
