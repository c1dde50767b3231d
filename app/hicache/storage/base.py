"""What a storage tier is: values of bytes under page keys, in batches, each call within a deadline.

A fault of a storage is an outcome, never an exception: the tier above takes it for a miss or a write that did not
happen, and counts it by its name.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

PageKey = NewType("PageKey", bytes)
"""32 bytes from `app.core.keys.page_hashes`, seeded with `StorageIdentity.seed`."""

Buffer = bytes | bytearray | memoryview
Parts = tuple[Buffer, ...]
"""One value, in pieces that are stored one after the other, so that nobody must join them first."""

Deadline = float
"""Seconds of `time.monotonic`."""

NO_DEADLINE: Deadline = math.inf
KEY_BYTES = 32


class Operation(enum.StrEnum):
    """What a storage can be asked."""

    EXISTS = "exists"
    GET = "get"
    SET = "set"
    DELETE = "delete"


class Outcome(enum.StrEnum):
    """What became of one key in one call."""

    HIT = "hit"
    STORED = "stored"
    PRESENT = "present"  # not written: the storage has it already
    DELETED = "deleted"
    ABSENT = "absent"

    SHORT = "short"  # a value with fewer bytes than it should have
    LONG = "long"
    STALE = "stale"  # written by another version of the format
    FOREIGN = "foreign"  # of another model, other weights or another layout
    MISPLACED = "misplaced"  # whole, but the value of another key
    DAMAGED = "damaged"

    TOO_LARGE = "too_large"
    FULL = "full"  # no room on the device, and none that may be made
    DENIED = "denied"
    FAULT = "fault"  # anything else that went wrong; may be gone at the next try
    LATE = "late"  # the deadline passed

    QUEUE_FULL = "queue_full"
    BREAKER_OPEN = "breaker_open"
    CANCELLED = "cancelled"
    CLOSED = "closed"


BAD_VALUES = frozenset(
    {Outcome.SHORT, Outcome.LONG, Outcome.STALE, Outcome.FOREIGN, Outcome.MISPLACED, Outcome.DAMAGED}
)
"""What a value can be that is there and of no use. It is deleted, so that a good one can take its place."""


class Got(NamedTuple):
    """What a read gave for one key; `value` is there for a HIT only, and nobody writes to it again."""

    outcome: Outcome
    value: Buffer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What may be expected of a storage."""

    persistent: bool  # values outlive the process
    shared: bool  # other processes see them
    max_value_bytes: int | None = None


class Usage(NamedTuple):
    """What a storage holds, headers included."""

    num_bytes: int
    num_values: int


class HiCacheStorage(Protocol):
    """One storage tier. Safe from any thread. Results are in the order of the keys, one each.

    No call raises for a fault of the storage. A call returns by its deadline where the system lets it; what was not
    reached by then is LATE.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    def exists(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        """HIT, ABSENT or a fault. Says nothing about whether the value is a good one."""
        ...

    def get(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Got]:
        """The values as they were set, or the outcome that stands for a miss."""
        ...

    def set(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        """STORED or a refusal. A value is there as a whole or not at all, and takes the place of an older one.

        The parts are read before the call returns, and not after.
        """
        ...

    def delete(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        """DELETED, ABSENT or a fault."""
        ...

    def clear(self, deadline: Deadline) -> int:
        """Delete every value of ours, of whatever identity. -> how many."""
        ...

    def usage(self) -> Usage | None:
        """What is stored, by whomever; None where only the service knows."""
        ...

    def close(self) -> None:
        """Let go of everything. Idempotent; what is stored stays where `capabilities` says so."""
        ...

    def check_integrity(self) -> None:
        """IntegrityError where what the storage believes differs from what is there."""
        ...


def remaining_s(deadline: Deadline) -> float:
    """Seconds left, 0 when it has passed."""
    return max(0.0, deadline - time.monotonic())


def has_passed(deadline: Deadline) -> bool:
    return time.monotonic() >= deadline


def size_of(parts: Parts) -> int:
    """Bytes of one value."""
    return sum(len(part) for part in parts)
