"""When pages move between tiers, as the settings say it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WritePolicy = Literal["write_through", "write_through_selective", "write_back"]
PrefetchPolicy = Literal["best_effort", "timeout", "wait_complete"]
HostMode = Literal["cache", "buffer_only"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TierSettings:
    """Checked where the flags are; see ServerArgs for what they mean."""

    write_policy: WritePolicy = "write_through_selective"
    write_min_hits: int = 2
    host_mode: HostMode = "cache"
    prefetch_policy: PrefetchPolicy = "timeout"
    prefetch_timeout_s: float = 2.0
    storage_deadline_s: float = 10.0  # after which a lookup or a fetch is given up
