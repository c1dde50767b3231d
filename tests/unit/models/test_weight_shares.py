"""The part of a weight that one device holds."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from app.models.weight_shares import padded_rows, replicated_head_rows, share

EVERYTHING = slice(None)


def matrix(rows: int = 6, columns: int = 4) -> np.ndarray:
    return np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)


def test_shares_put_together_are_the_weight_with_rows_of_zeros_behind_it() -> None:
    rows = padded_rows(6, 8)

    shares = [share(matrix(), rows, (slice(at, at + 4), EVERYTHING), np.float32) for at in (0, 4)]

    np.testing.assert_array_equal(np.concatenate(shares), np.pad(matrix(), ((0, 2), (0, 0))))


def test_a_head_is_held_by_as_many_ranks_as_share_it() -> None:
    rows = replicated_head_rows(6, head_dim=3, copies=2)

    shares = [share(matrix(), rows, (slice(at, at + 3), EVERYTHING), np.float32) for at in (0, 3, 6, 9)]

    for rank, held in enumerate(shares):
        np.testing.assert_array_equal(held, matrix()[rank // 2 * 3 :][:3])


def test_columns_and_vectors_are_cut_too() -> None:
    np.testing.assert_array_equal(
        share(matrix(), padded_rows(6, 6), (EVERYTHING, slice(2, 4)), np.float32), matrix()[:, 2:]
    )
    np.testing.assert_array_equal(
        share(matrix()[:, 0], padded_rows(6, 6), (slice(1, 3),), np.float32), matrix()[1:3, 0]
    )


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_share_is_a_copy_of_the_wanted_type(dtype: type) -> None:
    source = matrix()

    held = share(source, padded_rows(6, 6), (EVERYTHING, EVERYTHING), dtype)
    held[0, 0] = 100

    assert held.dtype == dtype
    assert source[0, 0] == 0


def test_only_the_wanted_rows_of_a_mapped_file_are_read(tmp_path: Path) -> None:
    """The file ends before the rows of the other rank do: touching those would kill the process or raise."""
    # given: a file whose second half is cut off after it was mapped
    path = tmp_path / "weights"
    page = 4096
    whole = np.arange(2 * page, dtype=np.float32).reshape(8, page // 4)
    whole.tofile(path)
    mapped = np.memmap(path, np.float32, "r", shape=whole.shape)
    with path.open("r+b") as file:
        file.truncate(whole.nbytes // 2)

    # when
    held = share(mapped, padded_rows(8, 8), (slice(0, 4), EVERYTHING), np.float32)

    # then
    np.testing.assert_array_equal(held, whole[:4])
