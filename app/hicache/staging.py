"""The device memory that pages on their way between tiers take."""

from __future__ import annotations

from app.core.transfers import TierLimits
from app.errors import ConfigError, IntegrityError
from app.tpu.tier_copies import TierCopy


class Staging:
    """How many bytes are taken: never more than the limit.

    Taken from the moment at which a transfer is allowed until its copy is over: for a backup when the host has it, for
    a restore when it was handed to the program that writes it into the pool. What a copy that was given up holds stays
    taken until it is over, too.
    """

    def __init__(self, limits: TierLimits) -> None:
        """ConfigError when not even one page would fit."""
        self.limit = limits.staging_bytes
        self.largest_page = max(limits.page_bytes)
        if self.limit < self.largest_page:
            allowed = f"at least {self.largest_page}, the bytes of one page"
            raise ConfigError(field="staging_bytes", value=self.limit, allowed=allowed)
        self.num_bytes = 0
        self.most_bytes = 0
        self._given_up: list[tuple[TierCopy, int]] = []

    @property
    def room(self) -> int:
        return self.limit - self.num_bytes

    @property
    def given_up_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self._given_up)

    def take(self, num_bytes: int) -> None:
        """For who has seen that there is room."""
        self.num_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.num_bytes)

    def give_back(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes

    def give_up(self, copy: TierCopy, num_bytes: int) -> None:
        """Nobody waits for this copy any more; its bytes are given back when it is over."""
        self._given_up.append((copy, num_bytes))

    def sweep(self) -> None:
        """Give back what copies held that were given up and are over."""
        if self._given_up:
            over = [each for each in self._given_up if each[0].ready()]
            self._given_up = [each for each in self._given_up if each not in over]
            self.give_back(sum(num_bytes for _, num_bytes in over))

    def clear(self) -> None:
        """Everybody is gone."""
        self._given_up.clear()
        self.num_bytes = 0

    def check_integrity(self, in_use: int) -> None:
        """in_use: by transfers under way."""
        if self.num_bytes != in_use + self.given_up_bytes or not 0 <= self.num_bytes <= self.limit:
            broken = f"{self.num_bytes} of {self.limit} bytes are taken, {in_use} + {self.given_up_bytes} are in use"
            raise IntegrityError(owner="Staging", broken=broken)
