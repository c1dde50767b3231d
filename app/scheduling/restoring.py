"""Waiting sequences whose prefix is brought back from the tiers below before they get a row.

        queued --holds back--> (fetched) --begin--> restoring --landed--> admitted, as any prefix hit is
                                              ^          |
                                              `--undo----'

Rows are planned on pages that have landed and on no others: a slow restore keeps its own request waiting, and no row.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.core.transfers import PageCounts
from app.scheduler_adapter import NOTHING, SchedulerAdapter
from app.scheduling.draft import Draft
from app.scheduling.request import Sequence

MAX_RESTORES = 4  # of one request, before it is computed: copies that fail again and again must not keep it waiting


@dataclass(slots=True, kw_only=True)
class Promised:
    """What a plan must leave over: for running rows, and for waiting sequences whose prefix is being restored."""

    pages: int
    window_pages: int
    rows: int = 0

    def add(self, restoring: PageCounts) -> None:
        """Of a waiting sequence; nothing where no restore is under way for it."""
        self.pages += restoring.pages
        self.window_pages += restoring.window_pages
        self.rows += bool(restoring)


class Restorer:
    """Begins restores as part of a draft."""

    def __init__(self, adapter: SchedulerAdapter) -> None:
        self._adapter = adapter
        self._tiers = adapter.tiers

    def holds_back(self, sequence: Sequence) -> bool:
        """Whether the sequence is better admitted later: something of its prefix is coming."""
        if self._tiers.holds_back(sequence.request_id):
            return True
        sequence.promised = NOTHING
        return False

    def wanted(self, sequence: Sequence, num_tokens: int) -> PageCounts:
        """What is better brought back than computed, if the device has `num_tokens` of it; zero, false, for nothing."""
        if sequence.num_restores >= MAX_RESTORES:
            return NOTHING
        return self._tiers.restorable(sequence.request_id, sequence.key, num_tokens)

    def begin(self, draft: Draft, sequence: Sequence, room: PageCounts, need: PageCounts) -> PageCounts:
        """Bring that back, of a sequence that is admitted. -> the pages that it takes; if any, it waits again.

        room: pages that it may take, evictable ones included. need: what the sequence takes beyond its prefix.
        """
        tiers, request_id = self._tiers, sequence.request_id
        # The lease keeps the prefix from the eviction that makes room behind it.
        taken = tiers.begin_restore(request_id, sequence.key, PageCounts(*(max(0, each) for each in room)))
        if not taken:
            return NOTHING
        draft.restoring = PageCounts(*(sum(each) for each in zip(draft.restoring, taken, strict=True)))
        draft.restores.append(sequence)
        self._adapter.make_room(draft.pages, draft.restoring)
        self._adapter.make_room_for_snapshots(draft.restoring.states)
        self._adapter.release(request_id)
        sequence.num_restores += 1
        sequence.promised = PageCounts(max(0, need.pages - taken.pages) + 1, need.window_pages)
        return taken

    def undo(self, draft: Draft) -> None:
        """The plan is not prepared: nothing is under way for it."""
        self._tiers.refused()
        for sequence in draft.restores:
            sequence.promised = NOTHING
            sequence.ahead = None
