"""How much to back up beside a step, so that decoding stays as quick as it is without, its slowest steps too.

Additive increase, multiplicative decrease, as TCP paces itself (Chiu and Jain, 1989).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection
from typing import NamedTuple


class Tolerance(NamedTuple):
    """ratio: what `quantile` of decode steps may take with backups under way, over the same without."""

    quantile: float
    ratio: float


# Below the 5 % in the middle that decoding may lose: a pace that measures passes its aim now and then.
TOLERATED = (Tolerance(0.5, 1.03), Tolerance(0.85, 1.08))
_JUDGED = 8  # steps with backups under way, after which the pace changes
_REMEMBERED = 64  # steps without
_START_PART = 8  # of all, that it begins at
_GROWTH_PART = 8  # of all, that a judgement adds
_SMOOTHING = 0.2
_PAUSE_AFTER = 64  # steps with backups under way, so that the time without them stays known
_PAUSE_PLANS = 2
_PIECE_PAGES = 8  # a copy of one page costs control nearly as much as one of eight


class BackupPace:
    """Bytes that a plan may begin to back up. Told of every step; knows time only from there.

    Steps are compared with steps of about as many rows (the same power of two) and without prompt tokens. A few are
    judged together, and each quantile has at least one step above it: so one slow step alone changes nothing.

    What is less than eight pages is saved up until it is as many. It never falls below one page a plan.
    """

    def __init__(self, most_bytes: int, page_bytes: int) -> None:
        self._most = most_bytes
        self._least = min(page_bytes, most_bytes)
        self._piece = min(_PIECE_PAGES * page_bytes, most_bytes)
        self._saved = 0
        self._step = max(most_bytes // _GROWTH_PART, 1)
        self._allowed = max(most_bytes // _START_PART, self._least)
        self._without_s: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_REMEMBERED))
        self._with_s: defaultdict[int, list[float]] = defaultdict(list)
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
        self._saved += self._allowed
        if self._saved < self._piece:
            return 0
        given, self._saved = self._saved, 0
        return given

    def lift(self) -> None:
        """Nobody decodes beside the next plan: it may begin all there is room for."""
        self._saved, self._pause_plans = self._most, 0

    def note_step(self, *, prompt_tokens: int, decode_rows: int, seconds: float, is_copying: bool) -> None:
        """A step took so long; is_copying: backups were under way meanwhile."""
        if prompt_tokens or not decode_rows or seconds <= 0:
            return
        rows = decode_rows.bit_length()
        if not is_copying:
            self._busy_steps[rows] = 0
            self._without_s[rows].append(seconds)
            return
        self._busy_steps[rows] += 1
        if self._busy_steps[rows] >= _PAUSE_AFTER:
            self._busy_steps[rows] = 0
            self._pause_plans = _PAUSE_PLANS
        judged, without = self._with_s[rows], self._without_s[rows]
        judged.append(seconds)
        if len(judged) < _JUDGED:
            return
        if without:
            self._judge(judged, without)
        judged.clear()

    def _judge(self, steps: Collection[float], without: Collection[float]) -> None:
        is_slow = any(_quantile(steps, at) > ratio * _quantile(without, at) for at, ratio in TOLERATED)
        self._allowed = max(self._allowed // 2, self._least) if is_slow else min(self._allowed + self._step, self._most)


def smoothed(before: float | None, seen: float) -> float:
    """An exponential moving average; the first value seen is its start."""
    return seen if before is None else before + _SMOOTHING * (seen - before)


def _quantile(values: Collection[float], quantile: float) -> float:
    """The least of them that so large a part does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(quantile * len(ordered)), len(ordered) - 1)]
