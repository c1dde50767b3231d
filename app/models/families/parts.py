"""Parts of a checkpoint's tensor, where it holds several weights. Like plans, they are equal for equal layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows from `first` on of each of `stretches` equally long stretches, stretch after stretch."""

    stretches: int
    first: int
    count: int

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        found = tensor.reshape(self.stretches, -1, *tensor.shape[1:])[:, self.first : self.first + self.count]
        return found.reshape(-1, *tensor.shape[1:])


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The same with an axis of stretches: (stretches, count, ...)."""

    rows: Rows

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        found = self.rows(tensor)
        return found.reshape(self.rows.stretches, -1, *found.shape[1:])


@dataclass(frozen=True, slots=True)
class PairsApart:
    """The last `count` rows of each stretch make pairs (0, 1), (2, 3), ...: the first of each, then the second.

    Done to queries and keys it leaves their products, and one way of rotating serves all models.
    """

    stretches: int
    count: int

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        by_stretch = tensor.reshape(self.stretches, -1, *tensor.shape[1:])
        before, pairs = by_stretch[:, : -self.count], by_stretch[:, -self.count :]
        return np.concatenate([before, pairs[:, 0::2], pairs[:, 1::2]], axis=1).reshape(tensor.shape)


@dataclass(frozen=True, slots=True)
class Taps:
    """Channels of a convolution over each channel by itself, (channels, 1, taps) -> (taps, count)."""

    first: int
    count: int

    def __call__(self, tensor: np.ndarray) -> np.ndarray:
        return tensor[self.first : self.first + self.count, 0].T
