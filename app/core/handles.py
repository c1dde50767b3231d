"""How control names what the runtime owns: by number and generation, never by address.

A handle whose generation is not the runtime's current one is refused with StaleHandleError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, NewType

import numpy as np

from app.errors import StaleHandleError

PageId = NewType("PageId", int)
Generation = NewType("Generation", int)
RuntimeId = NewType("RuntimeId", str)

Tier = Literal["device", "host", "storage"]


class CacheIdentity(NamedTuple):
    """Which pool a page id belongs to.

    `generation` grows on loss of the pool and on reopening; another process has another `runtime_id`. Flushing a cache
    frees its pages one by one, so no generation ends with it.
    Bare int32 page ids are meaningful only together with one identity.
    """

    runtime_id: RuntimeId
    generation: Generation


class RequestRuntimeHandle(NamedTuple):
    """A request's row in the runtime. `generation` grows each time the row is given to another request."""

    runtime_id: RuntimeId
    slot_id: int
    generation: Generation


class PageRun(NamedTuple):
    """`page_count` pages with consecutive ids, from `first_page` on."""

    first_page: PageId
    page_count: int


@dataclass(frozen=True, slots=True)
class CacheExtentRef:
    """Cached pages of one tier in token order. It owns nothing: hold a lock for as long as it is used."""

    identity: CacheIdentity
    tier: Tier
    page_runs: tuple[PageRun, ...]

    @classmethod
    def of(cls, identity: CacheIdentity, pages: np.ndarray, tier: Tier = "device") -> CacheExtentRef:
        """`pages`: (num_pages,) int32 in token order. O(num_pages), one object per run of consecutive ids."""
        if pages.size == 0:
            return cls(identity, tier, ())
        starts = np.flatnonzero(np.diff(pages) != 1) + 1
        bounds = [0, *starts.tolist(), pages.size]
        firsts = pages[bounds[:-1]].tolist()
        runs = zip(firsts, bounds[:-1], bounds[1:], strict=True)
        return cls(identity, tier, tuple(PageRun(PageId(first), end - begin) for first, begin, end in runs))

    def pages(self) -> np.ndarray:
        """(num_pages,) int32 page ids in token order."""
        if not self.page_runs:
            return np.empty(0, np.int32)
        return np.concatenate([np.arange(first, first + count, dtype=np.int32) for first, count in self.page_runs])

    def check(self, current: CacheIdentity) -> None:
        """Raise StaleHandleError unless this extent belongs to `current`."""
        if self.identity != current:
            raise StaleHandleError(what="cache extent of", held=tuple(self.identity), current=tuple(current))
