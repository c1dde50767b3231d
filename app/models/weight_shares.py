"""The part of a weight that one device holds, out of the weight as it lies in a file. The rest is not read."""

from __future__ import annotations

import numpy as np
from numpy.typing import DTypeLike

NO_ROW = -1  # a row of zeros


def padded_rows(num_rows: int, size: int) -> np.ndarray:
    """(size,) ints: all rows in order, then rows of zeros."""
    rows = np.full(size, NO_ROW)
    rows[:num_rows] = np.arange(num_rows)
    return rows


def replicated_head_rows(num_rows: int, head_dim: int, copies: int) -> np.ndarray:
    """(copies * num_rows,) ints: each head, head_dim rows, `copies` times in a row."""
    return np.repeat(np.arange(num_rows).reshape(-1, head_dim), copies, axis=0).reshape(-1)


def share(tensor: np.ndarray, rows: np.ndarray, index: tuple[slice, ...], dtype: DTypeLike) -> np.ndarray:
    """tensor[rows][index] as `dtype`, a fresh array; reads no more than that of `tensor`, which may be a mapped file.

    rows: (n,) ints, NO_ROW for zeros; index: one slice for each axis of the tensor.
    """
    wanted = rows[index[0]]
    columns = tensor[(slice(None), *index[1:])]
    taken = columns[np.maximum(wanted, 0)].astype(dtype, copy=False)
    taken[wanted == NO_ROW] = 0
    return taken
