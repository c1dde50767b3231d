"""Whether bringing a prefix back beats computing it, by rates as they were measured. Pure."""

from __future__ import annotations

from typing import NamedTuple

from app.caches.tiers.backup_pace import smoothed

_TRY_AFTER = 32  # restores not taken in a row, so that a rate that was low once is measured again


class Rates(NamedTuple):
    """As measured; None before the first measurement. Each is a mean of rates, not of times.

    So one that took very long, as a step does for which a program is compiled, takes a fifth off it and no more.
    """

    restored_bytes_per_s: float | None = None
    prompt_tokens_per_s: float | None = None
    steps_per_s: float | None = None


class RestoreChoice:
    """Optimistic until it knows the rates of a restore and of a prompt."""

    def __init__(self) -> None:
        self._restored_bytes_per_s: float | None = None
        self._prompt_tokens_per_s: float | None = None
        self._steps_per_s: float | None = None
        self._refused = 0

    @property
    def rates(self) -> Rates:
        return Rates(self._restored_bytes_per_s, self._prompt_tokens_per_s, self._steps_per_s)

    def is_worth(self, *, num_bytes: int, num_tokens: int) -> bool:
        """To move so many bytes, and be admitted one step later, rather than to compute so many tokens. O(1)."""
        bytes_per_s, tokens_per_s, steps_per_s = self.rates
        if bytes_per_s is None or tokens_per_s is None:
            return True
        step_s = 1.0 / steps_per_s if steps_per_s else 0.0
        if num_bytes / bytes_per_s + step_s < num_tokens / tokens_per_s:
            self._refused = 0
            return True
        self._refused += 1
        if self._refused < _TRY_AFTER:
            return False
        self._refused = 0
        return True

    def begin_at(self, restored_bytes_per_s: float) -> None:
        """What was measured before there were requests; from there on, by what is seen."""
        self._restored_bytes_per_s = restored_bytes_per_s

    def note_restore(self, *, num_bytes: int, seconds: float) -> None:
        """One landed."""
        if num_bytes and seconds > 0:
            self._restored_bytes_per_s = smoothed(self._restored_bytes_per_s, num_bytes / seconds)

    def note_step(self, *, prompt_tokens: int, seconds: float) -> None:
        """A step took so long and computed so many tokens of prompts."""
        if seconds <= 0:
            return
        self._steps_per_s = smoothed(self._steps_per_s, 1.0 / seconds)
        if prompt_tokens:
            self._prompt_tokens_per_s = smoothed(self._prompt_tokens_per_s, prompt_tokens / seconds)
