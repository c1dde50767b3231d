"""The interface of a prefix cache. A dozen verbs, the same for every registered type.

Who owns a page, over a request's life (half-open intervals of page indexes, P tokens each):

    0            cached           published                 held
    |-- tree's ---|---- tree's -----|---- the request's -----|
    |   matched   |  adopted by an  |  tail: partial page,   |
    |   & locked  |  insert, locked |  unsettled tokens      |

`insert` moves [cached, published) to the tree; where the tree already had such pages, its own stay and the request's
are duplicates: the caller frees them through `token_allocator.free` and reads the tree's from then on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from app.caches.inspection import Miss, TopPrefixes, miss_by_length
from app.caches.tiers.ports import NO_TIERS, CacheTiers, TierParts
from app.config.model_config import Component
from app.core.keys import RadixKey
from app.core.ports import DevicePool, TokenAllocator
from app.errors import ConfigError

NO_PAGES = np.empty(0, np.int32)
NO_PAGES.setflags(write=False)


class MatchResult(NamedTuple):
    """A cached prefix, whole pages. The pages stay the cache's: lock the match before using them.

    `node` is the cache's own; hand it back to `lock` and to nothing else.
    window_pages: with a SWA component: as many as `pages`, of the window pool; 0 before the last min(W, num_tokens)
        tokens, whose pages the match neither needs nor locks. Else empty.
    state: with a RECURRENT component: the snapshot of exactly num_tokens tokens; 0 only for no tokens.
    """

    pages: np.ndarray  # (num_tokens // page_size,) int32
    num_tokens: int
    node: Any
    window_pages: np.ndarray = NO_PAGES
    state: int = 0


class InsertResult(NamedTuple):
    """What an insert did. Lock it as a match is locked, to keep the published prefix.

    num_tokens: length of the published prefix, whole pages; 0 from a cache that keeps nothing.
    pages: (num_tokens // page_size - first,) int32, the cache's pages for it. Where they differ from the caller's, the
        caller's are duplicates, still the caller's, and to be freed by it.
    duplicates: (first page index, page count) of each run that was already there, one per node, in order.
    first: the page index at which `pages` and `window_pages` begin: where the caller's lock ends, if it named one.
    window_pages: with a SWA component: as many as `pages`, the cache's window pages, 0 where it has none. Where the
        caller gave a page and finds another here, its own is a duplicate. Else empty.
    state: with a RECURRENT component: the cache's snapshot of exactly num_tokens tokens; 0 only for no tokens.
    state_adopted: whether that is the one that the caller gave; if not, the caller's is still the caller's.
    """

    num_tokens: int
    pages: np.ndarray
    node: Any
    duplicates: tuple[tuple[int, int], ...]
    first: int = 0
    window_pages: np.ndarray = NO_PAGES
    state: int = 0
    state_adopted: bool = False


NOTHING_PUBLISHED = InsertResult(0, NO_PAGES, None, ())


class LockReceipt(NamedTuple):
    """Proof of one lock. Give it back once; a second time, or after a reset, it is stale."""

    epoch: int
    number: int


class EventSink(Protocol):
    """Receives what enters and leaves a cache. See observability/kv_events.py."""

    def stored(self, *, namespace: Any, parent_hash: bytes | None, page_hashes: list[bytes], raw: bytes) -> None: ...

    def removed(self, *, page_hashes: list[bytes]) -> None: ...

    def cleared(self) -> None: ...


EVICTED_HEAD_TOKENS = 24


class EvictionObserver(Protocol):
    """Told of each node that an eviction drops, before it is cut off, on the cache's own thread: it must be quick."""

    def evicted(self, *, num_tokens: int, prefix_tokens: int, idle_s: float, hits: int, head: bytes) -> None:
        """num_tokens: of the node, whole pages; prefix_tokens: of everything before it, which stays.

        idle_s: seconds since it was used. hits: matches that covered it. head: its first tokens, at most
        EVICTED_HEAD_TOKENS, int32 in native order.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheDeps:
    """All that a cache's constructor gets. Nothing else reaches it, and nothing is set on it afterwards.

    components: of the model; the type covers them.
    sliding_window, window_allocator: tokens, and the pages of the window pool, for a model with a SWA component.
    state_allocator: the snapshots of recurrent states as pages of one token, for a model with a RECURRENT component.
    clock: seconds that never go back.
    host_tier: what the tiers below the device pool are made of, for a cache that has them.
    """

    token_allocator: TokenAllocator
    device_pool: DevicePool
    components: frozenset[Component] = frozenset({Component.FULL})
    sliding_window: int | None = None
    window_allocator: TokenAllocator | None = None
    state_allocator: TokenAllocator | None = None
    page_size: int
    tp_rank: int = 0
    tp_size: int = 1
    eviction_policy: str = "lru"
    events: EventSink | None = None
    eviction_observer: EvictionObserver | None = None
    clock: Callable[[], float] = time.monotonic
    host_tier: Callable[[], TierParts] | None = None


class BasePrefixCache(ABC):
    """A prefix cache over page ids. Single-threaded: the scheduler's thread calls it."""

    takes_host_tier: ClassVar[bool] = False

    def __init__(self, deps: CacheDeps) -> None:
        """ConfigError for a host tier that the type does not take."""
        if deps.host_tier is not None and not self.takes_host_tier:
            raise ConfigError(
                field="--enable-hierarchical-cache",
                value=True,
                allowed=f"only with --cache-type unified_radix_cache: {type(self).__name__} has no tiers",
            )
        self.token_allocator = deps.token_allocator
        self.window_allocator = deps.window_allocator  # None without sliding windows
        self.state_allocator = deps.state_allocator  # None without recurrent layers
        self.sliding_window = deps.sliding_window
        self.page_size = deps.page_size

    @property
    @abstractmethod
    def reuses_prefixes(self) -> bool:
        """Whether a later request can ever hit; False makes schedulers skip probing and in-batch waiting."""

    @property
    def tiers(self) -> CacheTiers:
        """What is below the device pool."""
        return NO_TIERS

    @abstractmethod
    def match(self, key: RadixKey) -> MatchResult:
        """The longest cached prefix of `key`, cut to whole pages and never all of it: one token is left to compute.

        May split one node and refreshes recency; changes nothing else. O(len(key)). An unknown key matches 0 tokens.
        RadixAttention, arXiv:2312.07104.
        """

    @abstractmethod
    def probe(self, key: RadixKey) -> int:
        """The number of tokens that `match` would return; splits nothing, refreshes nothing."""

    @abstractmethod
    def lock(self, found: MatchResult | InsertResult) -> LockReceipt:
        """Keep that prefix from eviction until the receipt comes back. StaleHandleError if any of it is already gone.

        Its pages, all of them; its window pages of the last min(W, num_tokens) tokens; its snapshot.
        """

    @abstractmethod
    def unlock(self, receipt: LockReceipt) -> None:
        """Undo one `lock`. StaleHandleError for a receipt given back before, or from before a reset; no effect then.

        What only the lock kept and nobody could match any more leaves the cache.
        """

    def relock(self, receipt: LockReceipt, found: InsertResult) -> LockReceipt:
        """Lock what an insert published, and undo the lock that it was given as `after`. -> the receipt of now."""
        longer = self.lock(found)
        self.unlock(receipt)
        return longer

    def unlock_window(self, receipt: LockReceipt) -> None:  # noqa: B027  nothing to do without window pages
        """The holder's window is past what it locked: its window pages may go, the rest stays locked. Idempotent."""

    @abstractmethod
    def insert(
        self,
        key: RadixKey,
        pages: np.ndarray,
        window_pages: np.ndarray = NO_PAGES,
        state: int = 0,
        after: LockReceipt | None = None,
    ) -> InsertResult:
        """Publish settled tokens: cut to whole pages; the cache adopts the pages it did not have.

        Cut further where a component could not serve a later match: without a snapshot of its end, a recurrent model's
        prefix is published as far as snapshots reach. What is beyond stays the caller's.

        pages: (>= len(key) // page_size,) int32, held by the caller (or already the cache's, where it matched).
        window_pages: for a SWA component, as many; 0 where the caller's window has passed.
        state: for a RECURRENT component, a snapshot held by the caller, of exactly the
            key's tokens (whole pages); or 0.
        after: a lock of the caller's on a prefix of `key`. Pages before its end are not looked at, of either pool; a
            cache may tell only what comes behind it.
        """

    @abstractmethod
    def evict(self, num_pages: int) -> int:
        """Free at least `num_pages`, or all that is unlocked; whole nodes, leaves first, in the order of the policy.

        -> pages freed (through the allocator's port). `num_pages` is the shortfall, not the need; <= 0 does nothing.
        """

    def evict_window(self, num_pages: int) -> int:
        """Free at least so many window pages, or all that are unlocked, least recently needed first. -> pages freed.

        Prefixes stay, with holes; what nobody could match any more leaves whole.
        """
        return 0

    def evict_states(self, num_states: int) -> int:
        """Free at least so many snapshots, or all that are unlocked, the least recently used first. -> snapshots freed.

        Prefixes stay; what nobody could match any more leaves whole.
        """
        return 0

    @property
    @abstractmethod
    def evictable_pages(self) -> int:
        """Pages that `evict` could free now."""

    @property
    @abstractmethod
    def protected_pages(self) -> int:
        """Pages under a lock."""

    @property
    def evictable_window_pages(self) -> int:
        """Window pages that `evict_window` could free now."""
        return 0

    @property
    def protected_window_pages(self) -> int:
        """Window pages under a lock."""
        return 0

    @property
    def evictable_states(self) -> int:
        """Snapshots that `evict_states` could free now."""
        return 0

    @property
    def protected_states(self) -> int:
        """Snapshots under a lock."""
        return 0

    @property
    def num_nodes(self) -> int:
        """Entries that hold pages, for statistics; 0 from a cache that keeps nothing."""
        return 0

    @abstractmethod
    def cached_page_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """(evictable, protected) page ids, int32, for the ledger. O(pages); for checks, not for serving."""

    def cached_window_page_ids(self) -> tuple[np.ndarray, np.ndarray]:
        """(evictable, protected) page ids of the window pool, int32, for the ledger."""
        return NO_PAGES, NO_PAGES

    def cached_states(self) -> tuple[np.ndarray, np.ndarray]:
        """(evictable, protected) snapshots, int32, for the ledger."""
        return NO_PAGES, NO_PAGES

    def top_prefixes(self, limit: int) -> TopPrefixes:
        """The at most `limit` prefixes that saved most tokens. Reads only. Bounded, however large the cache is.

        None from a cache that keeps nothing, or does not tell.
        """
        return TopPrefixes((), 0, 0)

    def explain_miss(self, key: RadixKey, num_matched: int) -> Miss:
        """Why `match` returned no more than `num_matched` tokens for this key. Reads only. O(len(key)).

        Ask right after the match: the answer is about what is cached now.
        """
        told = miss_by_length(key, num_matched, self.page_size) if self.reuses_prefixes else None
        return told or Miss(
            reason="untold" if self.reuses_prefixes else "no_reuse",
            prompt_tokens=key.num_tokens,
            num_matched=num_matched,
            page_size=self.page_size,
        )

    @abstractmethod
    def reset(self) -> None:
        """Forget everything, without freeing: the pool itself was lost or flushed. Old receipts are refused after."""

    @abstractmethod
    def flush(self) -> int:
        """Evict everything evictable and return the pages freed; refused with LockedPageError while any is locked."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError unless every invariant of this cache holds. O(nodes)."""
