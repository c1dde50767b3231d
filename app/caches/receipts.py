"""Lock receipts: each is given out once, taken back once, and void after a reset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from app.caches.base import LockReceipt
from app.errors import StaleHandleError

_Held = TypeVar("_Held")


class ReceiptBook(Generic[_Held]):
    """Which locks are out, and what each holds. `epoch` grows on every `void`; numbers start anew with it."""

    __slots__ = ("_held", "_next", "epoch")

    def __init__(self) -> None:
        self.epoch = 0
        self._held: dict[int, _Held] = {}
        self._next = 0

    def issue(self, held: _Held) -> LockReceipt:
        number = self._next
        self._next = number + 1
        self._held[number] = held
        return LockReceipt(self.epoch, number)

    def check(self, receipt: LockReceipt) -> None:
        """StaleHandleError if the receipt was given back before, or is from before a `void`."""
        epoch, number = receipt
        if epoch != self.epoch or number not in self._held:
            raise StaleHandleError(what="lock receipt", held=(epoch, number), current=f"epoch {self.epoch}")

    def held_by(self, receipt: LockReceipt) -> _Held:
        """What the receipt holds. StaleHandleError as `check`."""
        self.check(receipt)
        return self._held[receipt.number]

    def move(self, receipt: LockReceipt, held: _Held) -> None:
        """The receipt, which is out, holds this instead."""
        self._held[receipt.number] = held

    def redeem(self, receipt: LockReceipt) -> _Held:
        """What the receipt held, once. StaleHandleError as `check`."""
        self.check(receipt)
        return self._held.pop(receipt.number)

    def void(self) -> None:
        """Every receipt that is out becomes stale."""
        self.epoch += 1
        self._held.clear()
        self._next = 0

    def held(self) -> Iterator[_Held]:
        """What is locked, once for every receipt that is out."""
        return iter(self._held.values())
