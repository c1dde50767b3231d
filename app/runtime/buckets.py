"""The sizes to which a step's shapes are rounded up: few shapes, so few compiled programs.

A step has two sections, each of a shape of its own: DecodeShape and ExtendShape. `ReachableShapes` lists those that a
run can come to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple, Protocol

MIN_ROWS = 2  # a program with one row writes its KV a hundred times slower on CPU
MIN_CHUNK = 16
MAX_CHUNK = 128  # longer chunks go through a layer in blocks of at most so many tokens, by the same programs
MIN_CONTEXT = 128  # tokens that the smallest page-table bucket covers


def bucket(count: int, smallest: int) -> int:
    """The power of two, at least `smallest`, that holds `count`."""
    return max(smallest, 1 << max(count - 1, 0).bit_length())


class Buckets(Protocol):
    """What the sizes of a step become."""

    def rows(self, count: int) -> int:
        """Rows of a section."""
        ...

    def tokens(self, count: int) -> int:
        """Prompt tokens of all rows together."""
        ...

    def chunk(self, longest: int) -> int:
        """Most prompt tokens of one row, or the longest chunk that makes a program of its own."""
        ...

    def pages(self, num_tokens: int) -> int:
        """Width of the page table, from the tokens of the longest row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PowersOfTwo:
    """The buckets of serving."""

    page_size: int
    max_pages: int  # of the longest request

    def rows(self, count: int) -> int:
        return bucket(count, MIN_ROWS)

    def tokens(self, count: int) -> int:
        return bucket(count, MIN_CHUNK)

    def chunk(self, longest: int) -> int:
        return min(bucket(longest, MIN_CHUNK), MAX_CHUNK)

    def pages(self, num_tokens: int) -> int:
        smallest = -(-MIN_CONTEXT // self.page_size)
        return min(bucket(-(-num_tokens // self.page_size), smallest), self.max_pages)


class DecodeShape(NamedTuple):
    rows: int
    pages: int


class ExtendShape(NamedTuple):
    rows: int
    tokens: int
    chunk: int
    pages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachableShapes:
    """The shapes of steps of up to `num_rows` rows and `chunk_tokens` prompt tokens. Smallest first."""

    buckets: PowersOfTwo
    num_rows: int
    chunk_tokens: int

    def rows(self) -> list[int]:
        return _doubling(MIN_ROWS, self.num_rows)

    def tokens(self) -> list[int]:
        return _doubling(MIN_CHUNK, self.chunk_tokens)

    def pages(self) -> list[int]:
        widths = [self.buckets.pages(1)]
        while widths[-1] < self.buckets.max_pages:
            widths.append(self.buckets.pages(widths[-1] * self.buckets.page_size + 1))
        return widths

    def decodes(self) -> list[DecodeShape]:
        return [DecodeShape(*shape) for shape in product(self.rows(), self.pages())]

    def extends(self) -> list[ExtendShape]:
        chunks = [size for size in self.tokens() if size <= MAX_CHUNK]
        shapes = product(self.rows(), self.tokens(), chunks, self.pages())
        return [shape for shape in map(ExtendShape._make, shapes) if self._reachable(shape)]

    def _reachable(self, shape: ExtendShape) -> bool:
        """Whether some rows, each of at least one token, have these buckets."""
        rows, most_rows = _least(shape.rows, MIN_ROWS), min(shape.rows, self.num_rows)
        chunk, tokens = _least(shape.chunk, MIN_CHUNK), _least(shape.tokens, MIN_CHUNK)
        most_tokens = min(shape.tokens, self.chunk_tokens)
        most_of_row = most_tokens if shape.chunk == MAX_CHUNK else shape.chunk
        longest = max(chunk, -(-tokens // most_rows))
        return (
            max(chunk + rows - 1, tokens) <= min(most_rows * most_of_row, most_tokens)
            and self.buckets.pages(longest) <= shape.pages
        )


def _doubling(smallest: int, largest: int) -> list[int]:
    sizes = [smallest]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


def _least(size: int, smallest: int) -> int:
    """The least count whose bucket is `size`."""
    return 1 if size == smallest else size // 2 + 1
