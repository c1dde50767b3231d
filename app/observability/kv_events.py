"""KV events: what entered and left a cache, for routers. Names and fields as in the KV events of vLLM and SGLang.

A page hash names a page's tokens, all tokens before them, and the namespace: two events speak of the same hash exactly
if the cache would share the page. This module takes ints and bytes and knows no cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

NamespaceFields: TypeAlias = tuple[str | None, str | None, str | None, int]  # adapter, salt, extra key, dp rank
Medium: TypeAlias = Literal["device", "host", "storage"]

MAX_EVENTS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Consecutive pages of one prefix were cached.

    page_hashes: one for each page, in order.
    parent_hash: hash of the page before them; None where they start a prefix.
    token_ids: page_size tokens for each page.
    """

    page_hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    page_size: int
    adapter: str | None
    salt: str | None
    extra_key: str | None
    dp_rank: int
    medium: Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """These pages, and only these, left the medium."""

    page_hashes: tuple[bytes, ...]
    medium: Medium


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """The medium was emptied, whatever it held."""

    medium: Medium = "device"


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class KvEventRecorder:
    """Collects the events of one tier until somebody drains them, which should be once a step.

    With `max_events` of them it forgets them all and says that the medium was emptied: listeners then know less than it
    holds, never more. The calls below are EventSink of caches/base.py.

    num_forgotten: events that nobody drained in time.
    """

    def __init__(self, *, page_size: int, medium: Medium = "device", max_events: int = MAX_EVENTS) -> None:
        self._page_size = page_size
        self._medium: Medium = medium
        self._max_events = max_events
        self._events: list[KvEvent] = []
        self.num_forgotten = 0

    def stored(
        self, *, namespace: NamespaceFields, parent_hash: bytes | None, page_hashes: list[bytes], raw: bytes
    ) -> None:
        """`raw`: the pages' tokens, int32 in native order."""
        adapter, salt, extra_key, dp_rank = namespace
        event = BlockStored(
            page_hashes=tuple(page_hashes),
            parent_hash=parent_hash,
            token_ids=tuple(array("i", raw)),
            page_size=self._page_size,
            adapter=adapter,
            salt=salt,
            extra_key=extra_key,
            dp_rank=dp_rank,
            medium=self._medium,
        )
        self._add(event)

    def removed(self, *, page_hashes: list[bytes]) -> None:
        self._add(BlockRemoved(page_hashes=tuple(page_hashes), medium=self._medium))

    def cleared(self) -> None:
        self._add(AllBlocksCleared(medium=self._medium))

    def drain(self) -> list[KvEvent]:
        """Every event since the last drain, in order."""
        drained, self._events = self._events, []
        return drained

    def _add(self, event: KvEvent) -> None:
        if len(self._events) >= self._max_events:
            self.num_forgotten += len(self._events)
            self._events = [AllBlocksCleared(medium=self._medium)]
        self._events.append(event)


class KvEventReplica:
    """What one cache holds in one medium, rebuilt from its events: the listener's side, e.g. of a router.

    Sound for a listener that joined late: it knows less than the cache holds, never more.
    """

    def __init__(self, medium: Medium = "device") -> None:
        self._medium = medium
        self.page_hashes: set[bytes] = set()

    def apply(self, events: Iterable[KvEvent]) -> None:
        """Events in the order in which they were drained; those of other media say nothing here."""
        for event in events:
            if event.medium != self._medium:
                continue
            match event:
                case BlockStored():
                    self.page_hashes.update(event.page_hashes)
                case BlockRemoved():
                    self.page_hashes.difference_update(event.page_hashes)
                case AllBlocksCleared():
                    self.page_hashes.clear()

    def num_cached_pages(self, page_hashes: Iterable[bytes]) -> int:
        """How many pages of a prefix, given as its hash chain, are cached from the start without a gap."""
        count = 0
        for page_hash in page_hashes:
            if page_hash not in self.page_hashes:
                break
            count += 1
        return count
