"""Restores under way: host pages travel to the device by themselves and are written on the thread that dispatches.

    begin -> pieces, as staging has room -> copied -> launch of its plan -> written into the pool -> ended

A page is written only once the plan that asked for it was launched: before that, steps that still read what the page
held may not have been dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import structlog

from app.core.transfers import OfEachPool, PageCounts, PageIds, TierLimits, TransferEnd
from app.hicache.counters import DirectionCounters
from app.hicache.parts import added, joined_contents, joined_ids, part_of_contents, part_of_ids
from app.hicache.staging import Staging
from app.tpu.lent_arrays import LentArrays
from app.tpu.page_carrier import PageCarrier, PoolContents
from app.tpu.page_carriers import scatter_each
from app.tpu.tier_copies import TierCopies, TierCopy

_log = structlog.get_logger(__name__)


class _Piece(NamedTuple):
    """Pages that travel together, and what they take of staging."""

    target: PageIds
    copy: TierCopy
    num_bytes: int


@dataclass(slots=True, kw_only=True)
class _Restore:
    """contents: host pages; they stay as they are, whatever becomes of their ids. target: device pages.

    cut: how many of them pieces were made of so far.
    """

    contents: PoolContents
    target: PageIds
    num_bytes: int
    begun_at: float
    cut: PageCounts = field(default_factory=PageCounts)
    pieces: list[_Piece] = field(default_factory=list)
    is_launched: bool = False
    has_compiled: bool = False
    failure: str | None = None

    @property
    def left(self) -> PageCounts:
        """Pages of which no piece was made yet."""
        return PageCounts(*(count - done for count, done in zip(self.target.counts(), self.cut, strict=True)))

    @property
    def waits(self) -> bool:
        """For staging."""
        return self.failure is None and bool(self.left)


class _Landed(NamedTuple):
    """Device arrays to be written, and where."""

    restore: _Restore
    target: PageIds
    contents: PoolContents


class Restores:
    """Single-threaded. The pool's arrays are taken and put within `advance` only."""

    def __init__(
        self,
        *,
        carriers: OfEachPool[PageCarrier | None],
        device_pool: LentArrays,
        copies: TierCopies,
        staging: Staging,
        limits: TierLimits,
        counters: DirectionCounters,
    ) -> None:
        self._carriers = carriers
        self._device = device_pool
        self._copies = copies
        self._staging = staging
        self._limits = limits
        self._counters = counters
        self._under_way: dict[int, _Restore] = {}  # the oldest first

    def begin(self, number: int, contents: PoolContents, target: PageIds, now: float) -> None:
        """Begin as many copies as staging has room for, behind those that wait already."""
        num_bytes = self._limits.num_bytes(target.counts())
        self._under_way[number] = _Restore(contents=contents, target=target, num_bytes=num_bytes, begun_at=now)
        self._begin_pieces()

    def undo(self, number: int) -> None:
        """Its plan will not be launched: give up what travels."""
        self._drop(self._under_way.pop(number))

    def launch(self, numbers: Sequence[int]) -> None:
        """From now on they may be written into the pool."""
        for number in numbers:
            self._under_way[number].is_launched = True

    def has_news(self, now: float) -> bool:
        """Whether `advance` would write or end something."""
        late = now - self._limits.copy_deadline_s
        return any(
            restore.failure is not None
            or restore.begun_at < late
            or any(piece.copy.ready() for piece in restore.pieces)
            for restore in self._under_way.values()
            if restore.is_launched
        )

    def advance(self, now: float) -> list[TransferEnd]:
        """Dispatch the writing of what has landed, begin what waited for its staging. -> what has ended.

        Raises what the device raises when it is given the pool: then the pool is lost, and `fail_all` comes next.
        """
        self._write(self._take_landed())
        late = now - self._limits.copy_deadline_s
        ends = []
        for number, restore in list(self._under_way.items()):
            if not restore.is_launched:
                continue
            if restore.failure is None and not restore.pieces and not restore.left:
                ends.append(self._end(number, now, None))
            elif restore.failure is not None or restore.begun_at < late:
                ends.append(self._end(number, now, restore.failure or "late"))
        self._begin_pieces()
        return ends

    def fail_all(self, now: float) -> list[TransferEnd]:
        """The device pool is lost."""
        return [self._end(number, now, "failed") for number in list(self._under_way)]

    def clear(self) -> None:
        """Forget them."""
        self._under_way.clear()

    @property
    def numbers(self) -> set[int]:
        return set(self._under_way)

    @property
    def is_waiting(self) -> bool:
        """Whether one waits for staging."""
        return any(restore.waits for restore in self._under_way.values())

    @property
    def is_copying(self) -> bool:
        """Whether one is under way that only polling tells about."""
        return any(restore.is_launched for restore in self._under_way.values())

    @property
    def staged_bytes(self) -> int:
        return sum(piece.num_bytes for restore in self._under_way.values() for piece in restore.pieces)

    def targets(self) -> list[PageIds]:
        """Device pages that are being written, of each."""
        return [restore.target for restore in self._under_way.values()]

    def _begin_pieces(self) -> None:
        """The oldest first, and none before it has all that it needs: so each gets its turn."""
        for number, restore in self._under_way.items():
            while restore.waits:
                rest = self._limits.num_bytes(restore.left)
                # Not in crumbs: many small copies are slow.
                if self._staging.room < min(rest, max(self._staging.limit // 2, self._staging.largest_page)):
                    return
                count = self._fitting(restore.left)
                contents = part_of_contents(restore.contents, restore.cut, count)
                try:
                    copy = self._copies.to_device(contents)
                except Exception as error:
                    self._fail(number, restore, error)
                    break
                piece = _Piece(part_of_ids(restore.target, restore.cut, count), copy, self._limits.num_bytes(count))
                self._staging.take(piece.num_bytes)
                restore.pieces.append(piece)
                restore.cut = added(restore.cut, count)

    def _fitting(self, left: PageCounts) -> PageCounts:
        """As many pages as staging has room for, pool by pool."""
        room, counts = self._staging.room, []
        for num_left, page_bytes in zip(left, self._limits.page_bytes, strict=True):
            count = min(num_left, room // page_bytes) if page_bytes else num_left
            room -= count * page_bytes
            counts.append(count)
        return PageCounts(*counts)

    def _take_landed(self) -> list[_Landed]:
        landed = []
        for number, restore in self._under_way.items():
            if not restore.is_launched or restore.failure is not None:
                continue
            for piece in [piece for piece in restore.pieces if piece.copy.ready()]:
                try:
                    landed.append(_Landed(restore, piece.target, piece.copy.result()))
                except Exception as error:
                    self._fail(number, restore, error)
                    break
                # By identity: pieces are arrays, which == compares page for page.
                restore.pieces = [each for each in restore.pieces if each is not piece]
                self._staging.give_back(piece.num_bytes)
        return landed

    def _write(self, landed: list[_Landed]) -> None:
        if landed:
            restores, ids, contents = zip(*landed, strict=True)
            pages, arrays = joined_ids(ids), joined_contents(contents)
            before = self._num_programs()
            self._device.put(scatter_each(self._carriers, self._device.take(), pages, arrays))
            if self._num_programs() > before:
                for restore in restores:
                    restore.has_compiled = True

    def _num_programs(self) -> int:
        return sum(carrier.num_programs for carrier in self._carriers if carrier is not None)

    def _fail(self, number: int, restore: _Restore, error: Exception) -> None:
        _log.warning("restore_failed", number=number, reason=repr(error))
        restore.failure = "failed"

    def _end(self, number: int, now: float, failure: str | None) -> TransferEnd:
        restore = self._under_way.pop(number)
        self._drop(restore)
        num_bytes = 0 if failure else restore.num_bytes
        end = TransferEnd(
            number=number,
            failure=failure,
            num_bytes=num_bytes,
            seconds=now - restore.begun_at,
            has_compiled=restore.has_compiled,
        )
        self._counters.count(end, sum(restore.target.counts()))
        return end

    def _drop(self, restore: _Restore) -> None:
        for piece in restore.pieces:
            self._staging.give_up(piece.copy, piece.num_bytes)
