"""Buckets: every shape that steps of any sizes have is listed, and no other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest_mock import MockerFixture

from app.models.layers.attention import QUERY_BLOCK
from app.models.layers.recurrence import BLOCK
from app.runtime import buckets
from app.runtime.buckets import MAX_CHUNK, DecodeShape, ExtendShape, PowersOfTwo, ReachableShapes, bucket


def shapes_of(page_size: int, max_pages: int, num_rows: int, chunk_tokens: int) -> ReachableShapes:
    powers = PowersOfTwo(page_size=page_size, max_pages=max_pages)
    return ReachableShapes(buckets=powers, num_rows=num_rows, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize(("count", "smallest", "size"), [(0, 2, 2), (1, 2, 2), (2, 2, 2), (3, 2, 4), (64, 16, 64)])
def test_a_bucket_is_the_next_power_of_two(count: int, smallest: int, size: int) -> None:
    assert bucket(count, smallest) == size


def test_chunks_that_a_layer_takes_in_blocks_are_not_told_apart() -> None:
    """The largest bucket of a chunk stands for the blocks of every kind of layer."""
    assert max(QUERY_BLOCK, BLOCK) == MAX_CHUNK
    shapes = shapes_of(16, 512, 16, 512)  # the bundled model's, by default
    assert [shapes.buckets.chunk(longest) for longest in (1, 17, 128, 129, 512)] == [16, 32, 128, 128, 128]
    assert len(shapes.extends()) == 370


def test_sizes_end_with_the_one_that_holds_the_largest() -> None:
    shapes = shapes_of(16, 100, 5, 40)

    assert (shapes.rows(), shapes.tokens(), shapes.pages()) == ([2, 4, 8], [16, 32, 64], [8, 16, 32, 64, 100])
    assert shapes_of(16, 3, 1, 1).decodes() == [DecodeShape(rows=2, pages=3)]


@settings(max_examples=200)
@given(
    page_size=st.integers(1, 40),
    max_pages=st.integers(1, 60),
    num_rows=st.integers(1, 9),
    chunk_tokens=st.integers(1, 600),
    seed=st.integers(0, 2**32 - 1),
)
def test_whatever_a_step_needs_is_listed(
    page_size: int, max_pages: int, num_rows: int, chunk_tokens: int, seed: int
) -> None:
    shapes = shapes_of(page_size, max_pages, num_rows, chunk_tokens)
    rounded, random = shapes.buckets, np.random.default_rng(seed)
    context = page_size * max_pages
    rows = int(random.integers(1, min(num_rows, chunk_tokens) + 1))
    lengths = np.minimum(random.multinomial(chunk_tokens - rows, np.full(rows, 1 / rows)) + 1, context)
    longest = int(random.integers(lengths.max(), context + 1))

    decode = DecodeShape(rounded.rows(rows), rounded.pages(longest))
    extend = ExtendShape(
        rounded.rows(rows),
        rounded.tokens(int(lengths.sum())),
        rounded.chunk(int(lengths.max())),
        rounded.pages(longest),
    )

    assert decode in shapes.decodes()
    assert extend in shapes.extends()


@pytest.mark.parametrize("most_chunk", [MAX_CHUNK, 16])
def test_no_shape_is_listed_that_no_step_has(mocker: MockerFixture, most_chunk: int) -> None:
    """Against every step of a small engine."""
    mocker.patch.object(buckets, "MAX_CHUNK", most_chunk)
    shapes = shapes_of(16, 24, 3, 40)
    found = set()
    for first in range(1, 41):
        for second in range(41 - first):
            for third in range(41 - first - second) if second else (0,):
                lengths = [length for length in (first, second, third) if length]
                sizes = shapes.buckets.rows(len(lengths)), shapes.buckets.tokens(sum(lengths))
                chunk = shapes.buckets.chunk(max(lengths))
                found |= {
                    ExtendShape(*sizes, chunk, shapes.buckets.pages(16 * page))
                    for page in range(1, 25)
                    if 16 * page >= max(lengths)
                }

    assert set(shapes.extends()) == found
