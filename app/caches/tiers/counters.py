"""What the tiers did so far, to be shown: nobody decides by it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.caches.tiers.restore_choice import Rates


class TierTally:
    """Counts as they grow. backup_drops, restore_failures: by reason."""

    def __init__(self) -> None:
        self.backed_up_tokens = 0
        self.restored_tokens = 0
        self.backed_up_bytes = 0
        self.restored_bytes = 0
        self.backup_s = 0.0
        self.restore_s = 0.0
        self.host_hits = 0
        self.not_worth_restoring = 0
        self.backup_drops: Counter[str] = Counter()
        self.restore_failures: Counter[str] = Counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCounters:
    """A snapshot.

    backed_up_tokens, restored_tokens: whole pages that arrived; *_bytes, *_s: of those copies, as their ends told.
    host_hits: restores that were begun. not_worth_restoring: times that computing was expected to be quicker.
    backup_drops: what should have been backed up and was not, in transfers, by reason. restore_failures: by reason.
    queue_length: prefixes that wait to be backed up. bytes_in_flight: of backups and restores under way.
    num_host_pages: full pages of the host pool; of those, num_host_pages_free by nobody held, and *_unlocked, *_locked
        in the tree; the rest is being written.
    storage: what the storage tier counts.
    """

    backed_up_tokens: int = 0
    restored_tokens: int = 0
    backed_up_bytes: int = 0
    restored_bytes: int = 0
    backup_s: float = 0.0
    restore_s: float = 0.0
    host_hits: int = 0
    not_worth_restoring: int = 0
    backup_drops: Mapping[str, int] = field(default_factory=dict)
    restore_failures: Mapping[str, int] = field(default_factory=dict)
    queue_length: int = 0
    backups_in_flight: int = 0
    restores_in_flight: int = 0
    bytes_in_flight: int = 0
    backup_bytes_a_plan: int = 0
    rates: Rates = field(default_factory=Rates)
    num_host_pages: int = 0
    num_host_pages_free: int = 0
    num_host_pages_unlocked: int = 0
    num_host_pages_locked: int = 0
    storage: Any = None
