"""One warning when backups bring nothing, and none otherwise."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from app.caches.tiers.counters import TierCounters
from app.server.restore_watch import EVERY_S, RestoreWatch


class Site:
    def __init__(self) -> None:
        self.now = 100.0
        self.told = TierCounters(num_host_pages=10)
        self.num_reads = 0
        self.watch = RestoreWatch(self.read, lambda: self.now)

    def read(self) -> TierCounters:
        self.num_reads += 1
        return self.told

    def warnings(self, looks: int = 1) -> int:
        with capture_logs() as lines:
            for _ in range(looks):
                self.now += EVERY_S
                self.watch.look(page_size=4)
        return len(lines)


def test_a_host_pool_filled_once_without_a_restore_is_told_once() -> None:
    site = Site()
    site.told = TierCounters(num_host_pages=10, backed_up_tokens=39)
    assert site.warnings(3) == 0

    site.told = TierCounters(num_host_pages=10, backed_up_tokens=40)

    assert site.warnings(3) == 1


def test_a_restore_ends_the_watch() -> None:
    site = Site()
    site.told = TierCounters(num_host_pages=10, backed_up_tokens=400, restored_tokens=4)

    assert site.warnings(5) == 0
    assert site.num_reads == 1


@pytest.mark.parametrize("told", [TierCounters(), TierCounters(num_host_pages=10)], ids=["no tiers", "no backups"])
def test_where_nothing_was_backed_up_nothing_is_told(told: TierCounters) -> None:
    site = Site()
    site.told = told
    assert site.warnings(3) == 0


def test_steps_in_between_read_nothing() -> None:
    site = Site()
    for _ in range(100):
        site.watch.look(page_size=4)
    assert site.num_reads == 1
