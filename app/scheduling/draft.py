"""A step as the planner puts it together, and what waits to be told to the runtime with it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

import numpy as np

from app.core.batch import PageRewrite
from app.core.handles import RequestRuntimeHandle
from app.core.transfers import PageCounts
from app.scheduler_adapter import NOTHING, Prefix
from app.scheduling.request import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """`length` tokens of a sequence from `start` on; `samples` when they reach the last known one."""

    sequence: Sequence
    start: int
    length: int
    samples: bool
    snapshot: bool = False  # of the recurrent state at its end


@dataclass(slots=True, kw_only=True)
class Draft:
    """One step being planned.

    pages: what prepare will have to reserve for its rows, with a window page for each; restoring: what besides, to
        bring back prefixes of the sequences in `restores`, which wait.
    """

    decode_slots: np.ndarray
    decode_snapshots: np.ndarray  # (d,) bool, rows whose recurrent state is to be kept after the step
    pages: int
    budget: int  # prompt tokens that may still join
    max_snapshots: int = sys.maxsize
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[tuple[Sequence, Prefix]] = field(default_factory=list)
    restoring: PageCounts = NOTHING
    restores: list[Sequence] = field(default_factory=list)

    @property
    def has_rows(self) -> bool:
        return bool(self.decode_slots.size or self.chunks)

    def snapshots(self) -> np.ndarray:
        """(rows,) bool: decode rows, then chunks."""
        due = np.concatenate([self.decode_snapshots, [chunk.snapshot for chunk in self.chunks]]).astype(np.bool_)
        due[np.flatnonzero(due)[self.max_snapshots :]] = False
        return due


@dataclass(slots=True)
class Outbox:
    """Decided, and to be told to the runtime with the next plan."""

    releases: list[RequestRuntimeHandle] = field(default_factory=list)
    rewrites: list[PageRewrite] = field(default_factory=list)
    published: dict[tuple[int, int], int] = field(default_factory=dict)  # (slot, generation) -> pages now the cache's

    def clear(self) -> None:
        self.releases.clear()
        self.rewrites.clear()
        self.published.clear()

    def release(self, handle: RequestRuntimeHandle) -> None:
        """The row goes back, and nothing more is told about it."""
        self.releases.append(handle)
        self.rewrites = [rewrite for rewrite in self.rewrites if rewrite.slot != handle.slot_id]
        self.published.pop((handle.slot_id, handle.generation), None)
