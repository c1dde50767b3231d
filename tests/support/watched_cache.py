"""A radix cache with a clock that the test moves, and an observer of its evictions."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from app.caches.inspection import Miss
from app.config.model_config import Component
from app.core.keys import DEFAULT_NAMESPACE, Namespace
from tests.support.tree_model import CacheRig, key_of

PAGE = 4


@dataclass
class Watch:
    """A clock that stands still until it is told."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Seen:
    """An eviction observer that keeps what it was told."""

    nodes: list[tuple[int, int, float, int, list[int]]] = field(default_factory=list)

    def evicted(self, *, num_tokens: int, prefix_tokens: int, idle_s: float, hits: int, head: bytes) -> None:
        self.nodes.append((num_tokens, prefix_tokens, idle_s, hits, np.frombuffer(head, np.int32).tolist()))


class WatchedRig(CacheRig):
    """A cache with a clock and an observer of its own."""

    def __init__(
        self,
        cache_type: str = "radix_cache",
        *,
        components: frozenset[Component] = frozenset({Component.FULL}),
        num_pages: int = 64,
        page_size: int = PAGE,
    ) -> None:
        self.watch = Watch()
        self.seen = Seen()
        super().__init__(
            cache_type,
            components=components,
            num_pages=num_pages,
            page_size=page_size,
            eviction_observer=self.seen,
            clock=self.watch,
        )

    def why(self, tokens: object, namespace: Namespace = DEFAULT_NAMESPACE) -> Miss:
        """As a scheduler asks: the match first."""
        key = key_of(tokens, namespace)
        return self.cache.explain_miss(key, self.cache.match(key).num_tokens)
