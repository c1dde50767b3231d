"""Which layers run in one program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

MAX_GROUPS = 4  # layer programs a call: two steps that decode, extend and sample stay below the CPU client's 32


def layer_groups(layers: Sequence[Hashable]) -> tuple[slice, ...]:
    """The layers of each program: at most MAX_GROUPS, of one size but for the last.

    Groups of the same kinds of layers in the same order share one compiled program, so of all sizes the one is taken
    that leaves the fewest layers to compile; the smallest of these.
    """
    least = -(-len(layers) // MAX_GROUPS)
    return min(
        (_of_size(size, len(layers)) for size in range(least, len(layers) + 1)), key=lambda it: _compiled(it, layers)
    )


def _of_size(size: int, num_layers: int) -> tuple[slice, ...]:
    return tuple(slice(first, min(first + size, num_layers)) for first in range(0, num_layers, size))


def _compiled(groups: tuple[slice, ...], layers: Sequence[Hashable]) -> int:
    """Layers in programs that differ."""
    return sum(len(pattern) for pattern in {tuple(layers[group]) for group in groups})
