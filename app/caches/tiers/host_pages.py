"""The host tier as the storage tier below it sees it."""

from __future__ import annotations

from typing import Any, Protocol

from app.caches.tiers.span import Span
from app.core.keys import RadixKey
from app.core.transfers import PageCounts, PageIds


class HostPages(Protocol):
    """Prefixes of pages in host memory. Whole pages, chained from the root."""

    @property
    def page_size(self) -> int: ...

    def probe(self, key: RadixKey) -> int:
        """Tokens of the key's longest usable prefix, whole pages, never all of the key. Reads only."""
        ...

    def num_present(self, key: RadixKey) -> int:
        """Pages on the key's path, usable or not. Reads only."""
        ...

    def span(self, key: RadixKey, first: int) -> Span:
        """What is there from page index `first` to `num_present`. Reads only."""
        ...

    def lock(self, key: RadixKey) -> tuple[int, Any]:
        """Keep the longest usable prefix, as just used. -> its pages; a receipt for `unlock`."""
        ...

    def unlock(self, receipt: Any) -> None: ...

    def insert(self, key: RadixKey, span: Span) -> Span:
        """The caller's pages become the tier's where it has none; all others are freed. -> what was adopted.

        All are freed if the pages before the span are not there.
        """
        ...

    def free(self, ids: PageIds) -> None:
        """Give back pages that the caller holds."""
        ...

    def reachable(self) -> PageCounts:
        """Pages that `make_room` could bring together."""
        ...

    def make_room(self, counts: PageCounts) -> bool:
        """Evict until so many are free for the next plan, beside what was made for it before. -> whether they are."""
        ...

    def drop(self, key: RadixKey) -> None:
        """Let go of the unlocked end of the key's path, as far as no longer prefix needs it."""
        ...
