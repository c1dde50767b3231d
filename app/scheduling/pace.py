"""How fast steps are: what a cache's tiers need to know to tell whether a restore is quicker than computing."""

from __future__ import annotations

import time

from app.caches.tiers.ports import CacheTiers
from app.scheduling.settling import InFlight


class Pace:
    """Times the steps of one scheduler, as they are read in order."""

    def __init__(self, tiers: CacheTiers) -> None:
        self._tiers = tiers
        self._last_ns = 0  # when the step before was read

    def note(self, step: InFlight) -> None:
        """The step was read just now. One without rows computed nothing."""
        now = time.perf_counter_ns()
        began, self._last_ns = max(self._last_ns, step.dispatched_ns), now
        if step.num_rows:
            self._tiers.note_step(
                prompt_tokens=sum(chunk.length for chunk in step.chunks),
                decode_rows=step.decode_slots.size,
                seconds=(now - began) / 1e9,
            )
