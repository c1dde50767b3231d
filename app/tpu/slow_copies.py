"""Copies that go wrong as a test says. For tests and dry runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from app.tpu.page_carrier import PoolContents
from app.tpu.tier_copies import TierCopies, TierCopy

_NONE: Mapping[int, int] = MappingProxyType({})


class SlowCopies:
    """Other copies, some of them late, never over, or failed.

    Copies are numbered 0, 1, ... as they are begun, those to the host and those to the device together.
    late: for how many polls a copy is not ready though it is over. never: those that are never ready, and time out for
    whoever waits. fail: those that are ready at once and raise.
    """

    def __init__(
        self,
        copies: TierCopies,
        *,
        late: Mapping[int, int] = _NONE,
        never: Collection[int] = (),
        fail: Collection[int] = (),
    ) -> None:
        self._copies = copies
        self._late = late
        self._never = frozenset(never)
        self._fail = frozenset(fail)
        self.num_begun = 0

    def to_host(self, contents: PoolContents) -> TierCopy:
        return self._begun(self._copies.to_host(contents))

    def to_device(self, contents: PoolContents) -> TierCopy:
        return self._begun(self._copies.to_device(contents))

    def _begun(self, copy: TierCopy) -> TierCopy:
        number = self.num_begun
        self.num_begun += 1
        if number in self._never:
            return _NeverOver(number, copy.num_bytes)
        if number in self._fail:
            return _Failed(number, copy.num_bytes)
        return _Late(copy, self._late.get(number, 0))


@dataclass(frozen=True, slots=True)
class _NeverOver:
    number: int
    num_bytes: int

    def ready(self) -> bool:
        return False

    def result(self) -> PoolContents:
        raise TimeoutError(f"copy {self.number} is one that is never over")


@dataclass(frozen=True, slots=True)
class _Failed:
    number: int
    num_bytes: int

    def ready(self) -> bool:
        return True

    def result(self) -> PoolContents:
        raise RuntimeError(f"injected failure of copy {self.number}")


class _Late:
    def __init__(self, copy: TierCopy, num_polls: int) -> None:
        self.num_bytes = copy.num_bytes
        self._copy = copy
        self._num_polls = num_polls

    def ready(self) -> bool:
        if self._num_polls:
            self._num_polls -= 1
            return False
        return self._copy.ready()

    def result(self) -> PoolContents:
        return self._copy.result()
