"""Says so when backups are of no use."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from app.caches.tiers.counters import TierCounters

_log = structlog.get_logger(__name__)

EVERY_S = 10.0


class RestoreWatch:
    """One warning, once as much was backed up as the host pool holds and nothing of it was ever restored."""

    def __init__(self, counters: Callable[[], TierCounters], clock: Callable[[], float] = time.monotonic) -> None:
        self._counters = counters
        self._clock = clock
        self._next_look: float | None = clock()  # None: there is nothing more to find out

    def look(self, page_size: int) -> None:
        """After a step. Reads the counters every 10 seconds, and no more once something was restored, or it warned."""
        now = self._clock()
        if self._next_look is None or now < self._next_look:
            return
        self._next_look = now + EVERY_S
        told = self._counters()
        if told.restored_tokens:
            self._next_look = None
        elif 0 < told.num_host_pages * page_size <= told.backed_up_tokens:
            self._next_look = None
            _log.warning(
                "nothing_was_restored",
                backed_up_tokens=told.backed_up_tokens,
                host_pool_tokens=told.num_host_pages * page_size,
                not_worth_restoring=told.not_worth_restoring,
                hint="no prefix came back after it was evicted, or computing is quicker: see docs/hicache.md",
            )
