"""How much to back up beside a step, so that decoding stays as quick as it is without.

Additive increase, multiplicative decrease, as TCP paces itself (Chiu and Jain, 1989).
"""

from __future__ import annotations

from collections import defaultdict

TOLERATED = 1.05  # a decode step with backups under way, over one without
_STEPS_OF_GROWTH = 16  # from nothing to all
_SMOOTHING = 0.2
_PAUSE_AFTER = 64  # steps with backups under way, so that the time without them stays known
_PAUSE_PLANS = 2


class BackupPace:
    """Bytes that a plan may begin to back up. Told of every step; knows time only from there.

    Steps are compared with steps of about as many rows (the same power of two) and without prompt tokens.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._step = max(most_bytes // _STEPS_OF_GROWTH, 1)
        self._allowed = most_bytes
        self._without_s: dict[int, float] = {}
        self._with_s: dict[int, float] = {}
        self._busy_steps: defaultdict[int, int] = defaultdict(int)
        self._pause_plans = 0

    @property
    def bytes_a_plan(self) -> int:
        """As it is now, pauses aside."""
        return self._allowed

    def take(self) -> int:
        """What the plan that is being made may begin; asked once a plan."""
        if self._pause_plans:
            self._pause_plans -= 1
            return 0
        return self._allowed

    def note_step(self, *, prompt_tokens: int, decode_rows: int, seconds: float, is_copying: bool) -> None:
        """A step took so long; is_copying: backups were under way meanwhile."""
        if prompt_tokens or not decode_rows or seconds <= 0:
            return
        rows = decode_rows.bit_length()
        if not is_copying:
            self._busy_steps[rows] = 0
            self._without_s[rows] = smoothed(self._without_s.get(rows), seconds)
            return
        self._busy_steps[rows] += 1
        if self._busy_steps[rows] >= _PAUSE_AFTER:
            self._busy_steps[rows] = 0
            self._pause_plans = _PAUSE_PLANS
        self._with_s[rows] = smoothed(self._with_s.get(rows), seconds)
        without = self._without_s.get(rows)
        if without is None:
            return
        if self._with_s[rows] > TOLERATED * without:
            self._allowed = max(self._allowed // 2, 1)
            self._with_s[rows] = without  # what was measured was at twice the pace
        else:
            self._allowed = min(self._allowed + self._step, self._most)


def smoothed(before: float | None, seen: float) -> float:
    """An exponential moving average; the first value seen is its start."""
    return seen if before is None else before + _SMOOTHING * (seen - before)
