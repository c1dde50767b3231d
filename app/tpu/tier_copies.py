"""Copies between device and pinned host memory that are under way."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from app.core.transfers import OfEachPool
from app.tpu.page_carrier import PageCarrier, PoolContents


class TierCopy(Protocol):
    """One that was begun."""

    @property
    def num_bytes(self) -> int:
        """Of the pages that it moves."""
        ...

    def ready(self) -> bool:
        """Whether it is over, well or not. Never waits."""
        ...

    def result(self) -> PoolContents:
        """The pages where they were to go. Waits until it is over; raises what it failed with."""
        ...


class TierCopies(Protocol):
    """Begins them. Returns at once, also when what is to be copied is still being computed."""

    def to_host(self, contents: PoolContents) -> TierCopy: ...

    def to_device(self, contents: PoolContents) -> TierCopy: ...


class DeviceCopies:
    """The device's own: one transfer of many arrays, beside whatever the device computes."""

    def __init__(self, carriers: OfEachPool[PageCarrier | None]) -> None:
        self._carriers = carriers

    def to_host(self, contents: PoolContents) -> TierCopy:
        begun = [
            carrier.to_host(pages) if carrier else [] for carrier, pages in zip(self._carriers, contents, strict=True)
        ]
        return _Begun(OfEachPool(*begun), self._num_bytes(contents))

    def to_device(self, contents: PoolContents) -> TierCopy:
        begun = [
            carrier.to_device(pages) if carrier else [] for carrier, pages in zip(self._carriers, contents, strict=True)
        ]
        return _Begun(OfEachPool(*begun), self._num_bytes(contents))

    def _num_bytes(self, contents: PoolContents) -> int:
        return sum(
            len(pages) * carrier.page_bytes
            for carrier, pages in zip(self._carriers, contents, strict=True)
            if carrier is not None
        )


class _Begun:
    def __init__(self, contents: PoolContents, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._contents = contents
        self._waited_for: list[Any] = jax.tree.leaves(contents)

    def ready(self) -> bool:
        while self._waited_for:
            if not self._waited_for[-1].is_ready():
                return False
            self._waited_for.pop()
        return True

    def result(self) -> PoolContents:
        return jax.block_until_ready(self._contents)
