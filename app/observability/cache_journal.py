"""What the cache did lately, for people: tokens hit and evicted by the second, the last admissions, the last evictions.

Plain values only; this module knows no cache. Not locked: one thread writes and snapshots, the engine's.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

SECONDS_KEPT = 900
ENTRIES_KEPT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that was admitted, and why it did not hit more. Token ids as in a Miss of caches/inspection.py.

    at: by the journal's clock. in_namespace: whether it gave a salt, an extra key or an adapter.
    """

    at: float
    request_id: str
    prompt_tokens: int
    cached_tokens: int
    reason: str
    sentence: str
    in_namespace: bool
    same: tuple[int, ...]
    prompt_goes_on: tuple[int, ...]
    cached_goes_on: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A node that was evicted. `head`: its first token ids; `prefix_tokens`: how many came before it, and stayed."""

    at: float
    num_tokens: int
    prefix_tokens: int
    idle_s: float
    hits: int
    head: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondOfTokens:
    """`second`: whole seconds of the journal's clock. Prompt tokens admitted, cached ones of them, tokens evicted."""

    second: int
    prompt_tokens: int
    cached_tokens: int
    evicted_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSnapshot:
    """Latest first, but `seconds` oldest first and without those in which nothing happened. `at`: when it was taken."""

    at: float
    seconds: tuple[SecondOfTokens, ...]
    admissions: tuple[Admission, ...]
    evictions: tuple[Eviction, ...]


@dataclass(slots=True)
class _Tally:
    second: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    evicted_tokens: int = 0


class CacheJournal:
    """The last 15 minutes by the second, the last 64 admissions and the last 64 evictions. Each write is O(1).

    `evicted` is EvictionObserver of caches/base.py.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds that never go back."""
        self._clock = clock
        self._tallies: deque[_Tally] = deque(maxlen=SECONDS_KEPT)
        self._admissions: deque[Admission] = deque(maxlen=ENTRIES_KEPT)
        # Raw, as told: evictions may come by the thousand, and most are pushed out before anybody looks.
        self._evictions: deque[tuple[float, int, int, float, int, bytes]] = deque(maxlen=ENTRIES_KEPT)

    def admitted(
        self,
        *,
        request_id: str,
        prompt_tokens: int,
        cached_tokens: int,
        reason: str,
        sentence: str,
        in_namespace: bool,
        same: tuple[int, ...] = (),
        prompt_goes_on: tuple[int, ...] = (),
        cached_goes_on: tuple[int, ...] = (),
    ) -> None:
        """A request got its row for the first time. The token ids: of the difference, where that is the reason."""
        now = self._clock()
        tally = self._tally(now)
        tally.prompt_tokens += prompt_tokens
        tally.cached_tokens += cached_tokens
        self._admissions.append(
            Admission(
                at=now,
                request_id=request_id,
                prompt_tokens=prompt_tokens,
                cached_tokens=cached_tokens,
                reason=reason,
                sentence=sentence,
                in_namespace=in_namespace,
                same=same,
                prompt_goes_on=prompt_goes_on,
                cached_goes_on=cached_goes_on,
            )
        )

    def evicted(self, *, num_tokens: int, prefix_tokens: int, idle_s: float, hits: int, head: bytes) -> None:
        """A node is being evicted. `head`: its first tokens, int32 in native order."""
        now = self._clock()
        self._tally(now).evicted_tokens += num_tokens
        self._evictions.append((now, num_tokens, prefix_tokens, idle_s, hits, head))

    def snapshot(self) -> JournalSnapshot:
        """All of it, as values that no later write changes. O(what is kept)."""
        now = self._clock()
        oldest = int(now) - SECONDS_KEPT
        return JournalSnapshot(
            at=now,
            seconds=tuple(
                SecondOfTokens(
                    second=tally.second,
                    prompt_tokens=tally.prompt_tokens,
                    cached_tokens=tally.cached_tokens,
                    evicted_tokens=tally.evicted_tokens,
                )
                for tally in self._tallies
                if tally.second > oldest
            ),
            admissions=tuple(reversed(self._admissions)),
            evictions=tuple(
                Eviction(
                    at=at,
                    num_tokens=num_tokens,
                    prefix_tokens=prefix_tokens,
                    idle_s=idle_s,
                    hits=hits,
                    head=tuple(array("i", head)),
                )
                for at, num_tokens, prefix_tokens, idle_s, hits, head in reversed(self._evictions)
            ),
        )

    def _tally(self, now: float) -> _Tally:
        """That of this second. Seconds in which nothing happens have none."""
        second = int(now)
        if not self._tallies or self._tallies[-1].second != second:
            self._tallies.append(_Tally(second))
        return self._tallies[-1]
