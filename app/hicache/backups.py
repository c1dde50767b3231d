"""Backups under way: gathered before their step, and copied into host memory by themselves once it is dispatched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from app.core.transfers import Backup, OfEachPool, PageCounts, PageIds, TierLimits, TransferEnd
from app.hicache.counters import DirectionCounters
from app.hicache.parts import added, fits, joined_ids, part_of_contents, part_of_ids
from app.hicache.staging import Staging
from app.memory.host_kv_pool import HostKVPool
from app.tpu.lent_arrays import LentArrays
from app.tpu.page_carrier import PageCarrier, PoolContents
from app.tpu.page_carriers import gather_each
from app.tpu.tier_copies import TierCopies, TierCopy

_log = structlog.get_logger(__name__)


@dataclass(slots=True, kw_only=True)
class _Backup:
    """source: device pages, read by `launch`. target: host pages. num_bytes: of staging, taken since `reserve`.

    gathered: between `launch` and `begin_copies`.
    """

    source: PageIds
    target: PageIds
    num_bytes: int
    begun_at: float = 0.0
    gathered: PoolContents | None = None
    copy: TierCopy | None = None


class Backups:
    """reserve -> launch -> begin_copies -> advance, until each has ended."""

    def __init__(
        self,
        *,
        host_pool: HostKVPool,
        carriers: OfEachPool[PageCarrier | None],
        device_pool: LentArrays,
        copies: TierCopies,
        staging: Staging,
        limits: TierLimits,
        counters: DirectionCounters,
    ) -> None:
        self._host = host_pool
        self._carriers = carriers
        self._device = device_pool
        self._copies = copies
        self._staging = staging
        self._limits = limits
        self._counters = counters
        self._under_way: dict[int, _Backup] = {}

    def reserve(self, backups: Sequence[Backup]) -> tuple[PageIds | None, ...]:
        """Host pages and staging for each; None, and it is refused, when one of them is short."""
        needs = [backup.source.counts() for backup in backups]
        sizes = [self._limits.num_bytes(counts) for counts in needs]
        total = PageCounts(*map(sum, zip(*needs, strict=True)))
        if sum(sizes) > self._staging.room or not fits(total, self._host.num_free()):
            return tuple(map(self._reserve_if_it_fits, backups, needs, sizes))
        ids = self._host.allocate(total)
        start, given = PageCounts(), []
        for backup, counts, num_bytes in zip(backups, needs, sizes, strict=True):
            given.append(self._reserve(backup, part_of_ids(ids, start, counts), num_bytes))
            start = added(start, counts)
        return tuple(given)

    def undo(self, number: int) -> None:
        """It was reserved and will not be launched. Unknown numbers, those that were refused: nothing."""
        backup = self._under_way.pop(number, None)
        if backup is not None:
            self._host.give_back(backup.target)
            self._staging.give_back(backup.num_bytes)

    def launch(self, numbers: Sequence[int], now: float) -> list[TransferEnd]:
        """Dispatch the gathers of all of them together. -> those that failed at once."""
        batch = [(number, self._under_way[number]) for number in numbers if number in self._under_way]
        if not batch:
            return []
        try:
            contents = self._gather(joined_ids([backup.source for _, backup in batch]))
        except Exception as error:
            _log.warning("backups_failed", reason=repr(error), num_backups=len(batch))
            return [self._end(number, now, "failed") for number, _ in batch]
        start = PageCounts()
        for _, backup in batch:
            counts = backup.source.counts()
            backup.begun_at = now
            backup.gathered = part_of_contents(contents, start, counts)
            start = added(start, counts)
        return []

    def begin_copies(self, now: float) -> list[TransferEnd]:
        """Of what was gathered, once the step is dispatched, which waits for none of this. -> those that failed now."""
        failed = []
        for number, backup in list(self._under_way.items()):
            if backup.gathered is None:
                continue
            gathered, backup.gathered = backup.gathered, None
            try:
                backup.copy = self._copies.to_host(gathered)
            except Exception as error:
                _log.warning("backup_failed", number=number, reason=repr(error))
                failed.append(self._end(number, now, "failed"))
        return failed

    def has_news(self, now: float) -> bool:
        """Whether `advance` would end one."""
        late = now - self._limits.copy_deadline_s
        return any(
            backup.copy.ready() or backup.begun_at < late
            for backup in self._under_way.values()
            if backup.copy is not None
        )

    def advance(self, now: float) -> list[TransferEnd]:
        """Fill the host pages of those that have landed. -> what has ended."""
        late = now - self._limits.copy_deadline_s
        ends = []
        for number, backup in list(self._under_way.items()):
            if backup.copy is None:
                continue
            if backup.copy.ready():
                ends.append(self._land(number, backup, backup.copy, now))
            elif backup.begun_at < late:
                ends.append(self._end(number, now, "late"))
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
    def is_copying(self) -> bool:
        """Whether one is under way that only polling tells about."""
        return any(backup.copy is not None for backup in self._under_way.values())

    @property
    def staged_bytes(self) -> int:
        return sum(backup.num_bytes for backup in self._under_way.values())

    def targets(self) -> list[PageIds]:
        """Host pages that are being written, of each."""
        return [backup.target for backup in self._under_way.values()]

    def _reserve_if_it_fits(self, backup: Backup, counts: PageCounts, num_bytes: int) -> PageIds | None:
        if num_bytes > self._staging.room or not fits(counts, self._host.num_free()):
            self._counters.num_refused += 1
            return None
        return self._reserve(backup, self._host.allocate(counts), num_bytes)

    def _reserve(self, backup: Backup, target: PageIds, num_bytes: int) -> PageIds:
        self._staging.take(num_bytes)
        self._under_way[backup.number] = _Backup(source=backup.source, target=target, num_bytes=num_bytes)
        return target

    def _gather(self, source: PageIds) -> PoolContents:
        buffers = self._device.take()
        try:
            return gather_each(self._carriers, buffers, source)
        finally:
            self._device.put(buffers)  # nothing was donated

    def _land(self, number: int, backup: _Backup, copy: TierCopy, now: float) -> TransferEnd:
        try:
            self._host.put(backup.target, copy.result())
        except Exception as error:
            _log.warning("backup_failed", number=number, reason=repr(error))
            return self._end(number, now, "failed")
        return self._end(number, now, None)

    def _end(self, number: int, now: float, failure: str | None) -> TransferEnd:
        backup = self._under_way.pop(number)
        if backup.copy is None or backup.copy.ready():
            self._staging.give_back(backup.num_bytes)
        else:
            self._staging.give_up(backup.copy, backup.num_bytes)
        end = TransferEnd(
            number=number,
            failure=failure,
            num_bytes=0 if failure else backup.num_bytes,
            seconds=now - backup.begun_at if backup.copy is not None else 0.0,
        )
        self._counters.count(end, sum(backup.target.counts()))
        return end
