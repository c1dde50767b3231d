"""bfloat16 kept as bits in a uint16 array holds, bit for bit, what an array of bfloat16 would."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from app.tpu.kv_pool import decode, encode, write_tokens

NUM = 32
LARGEST = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)  # float32 goes a little further
to_bits = jax.jit(lambda values: encode(values, jnp.dtype("uint16")))
from_bits = jax.jit(decode)
write = jax.jit(write_tokens)

# Where rounding, signs and special values meet: zeros, subnormals, ties, the largest numbers, infinities, NaNs.
EDGES = (0x00000000, 0x00000001, 0x00008000, 0x00018000, 0x007FFFFF, 0x3F808000, 0x3F818000, 0x7F7F7FFF, 0x7F7F8000)
EDGES += (0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7F80FFFF, 0x7FC00000, 0x7FFFFFFF)
SIGNED = [sign | edge for edge in EDGES for sign in (0, 0x80000000)]
patterns = st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(SIGNED), max_size=NUM)


def floats(bits: list[int]) -> np.ndarray:
    """(NUM,) float32 of these bit patterns; one shape, so that one program serves all examples."""
    padded = np.zeros(NUM, np.uint32)
    padded[: len(bits)] = bits
    return padded.view(np.float32)


def as_bfloat16(values: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", over="ignore"):
        return values.astype(ml_dtypes.bfloat16)


@settings(deadline=None)  # the first example compiles
@given(patterns)
@example(SIGNED)
def test_stored_bits_are_those_of_bfloat16(bits: list[int]) -> None:
    values = floats(bits)

    stored = np.asarray(to_bits(values))

    np.testing.assert_array_equal(stored, as_bfloat16(values).view(np.uint16))


def test_every_stored_pattern_is_read_as_the_number_that_it_is() -> None:
    every = np.arange(2**16, dtype=np.uint16)

    read = np.asarray(from_bits(every))

    np.testing.assert_array_equal(read.view(np.uint32), every.astype(np.uint32) << 16)


@settings(deadline=None)  # the first example compiles
@given(patterns)
@example(SIGNED)
def test_a_page_holds_the_nearest_finite_numbers_and_0_for_what_is_not_finite(bits: list[int]) -> None:
    # given: two tokens of half the numbers each
    values = floats(bits).reshape(2, NUM // 2)
    kept = np.where(np.isfinite(values), np.clip(values, -LARGEST, LARGEST), np.float32(0))

    # when
    pages, offsets = jnp.array([1, 1]), jnp.array([0, 1])
    as_bits = write(jnp.zeros((2, 2, NUM // 2), jnp.uint16), pages, offsets, values)
    as_numbers = write(jnp.zeros((2, 2, NUM // 2), jnp.bfloat16), pages, offsets, values)

    # then
    np.testing.assert_array_equal(as_bits[1], as_bfloat16(kept).view(np.uint16))
    np.testing.assert_array_equal(as_bits, np.asarray(as_numbers).view(np.uint16))
    assert np.isfinite(np.asarray(as_numbers)).all()
