"""Cutting and joining what is told of the three pools together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from app.core.transfers import NO_IDS, OfEachPool, PageCounts, PageIds
from app.tpu.page_carrier import PageArrays, PoolContents

NO_CONTENTS: PoolContents = OfEachPool((), (), ())


def joined_ids(each: Sequence[PageIds]) -> PageIds:
    """One after another, in each pool."""
    return PageIds(*(np.concatenate(ids) for ids in zip(NO_IDS, *each, strict=True)))


def joined_contents(each: Sequence[PoolContents]) -> PoolContents:
    """The same for pages' contents."""
    pages: tuple[list[PageArrays], ...] = ([], [], [])
    for contents in each:
        for all_of_kind, of_kind in zip(pages, contents, strict=True):
            all_of_kind.extend(of_kind)
    return OfEachPool(*pages)


def part_of_ids(ids: PageIds, start: PageCounts, count: PageCounts) -> PageIds:
    """So many of each pool, from `start` on."""
    return PageIds(*(each[first : first + n] for each, first, n in zip(ids, start, count, strict=True)))


def part_of_contents(contents: PoolContents, start: PageCounts, count: PageCounts) -> PoolContents:
    """The same for pages' contents."""
    return OfEachPool(*(each[first : first + n] for each, first, n in zip(contents, start, count, strict=True)))


def added(some: PageCounts, more: PageCounts) -> PageCounts:
    return PageCounts(*(each + other for each, other in zip(some, more, strict=True)))


def fits(counts: PageCounts, room: PageCounts) -> bool:
    """Whether no pool has less room than that."""
    return all(count <= free for count, free in zip(counts, room, strict=True))
