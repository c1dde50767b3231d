"""RadixCache, and UnifiedRadixCache with full attention alone: against a flat list, step by step, and one another."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from app.caches.base import InsertResult, LockReceipt, MatchResult
from app.caches.inspection import Miss
from app.caches.tree.core import TreeCore
from app.caches.tree.inspection import HEAD_TOKENS
from app.core.keys import DEFAULT_NAMESPACE, Namespace
from app.errors import LockedPageError, OutOfPagesError, StaleHandleError
from app.observability.kv_events import KvEventRecorder, KvEventReplica
from tests.support.tree_model import CacheRig, ListModel, key_of

Path = tuple[tuple[int, ...], ...]  # the tokens of a prefix, page by page

PAGE_SIZE = 2
NUM_PAGES = 24

namespaces = st.sampled_from([DEFAULT_NAMESPACE, Namespace(salt=""), Namespace(adapter="x", dp_rank=1)])
token_lists = st.lists(st.integers(0, 1), max_size=13)


class TreeMachine(RuleBasedStateMachine):
    receipts = Bundle("receipts")
    spent = Bundle("spent")
    matches = Bundle("matches")
    held = Bundle("held")
    cache_type = "radix_cache"

    @initialize()
    def start(self) -> None:
        self.recorder = KvEventRecorder(page_size=PAGE_SIZE)
        self.replica = KvEventReplica()
        self.rig = CacheRig(self.cache_type, num_pages=NUM_PAGES, page_size=PAGE_SIZE, events=self.recorder)
        self.cache = self.rig.cache
        self.model = ListModel(PAGE_SIZE)
        self.held_pages: list[np.ndarray] = []
        self.ever_cached: set[tuple[Namespace, Path]] = set()  # in this pool

    @property
    def tree(self) -> TreeCore:
        return self.cache._live_tree  # the order of eviction is compared too, and nobody outside the cache can see it

    def reserve(self, num_pages: int) -> np.ndarray:
        """Pages for a request, evicting the shortfall as a scheduler does."""
        shortfall = num_pages - self.rig.allocator.port.available()
        if shortfall > 0:
            freed = self.model.evict(shortfall)
            assert self.cache.evict(shortfall) == len(freed)
        return self.rig.take(num_pages)

    def insert(self, namespace: Namespace, path: Path, pages: np.ndarray) -> list[int]:
        """Into the model."""
        self.ever_cached.update((namespace, path[: end + 1]) for end in range(len(path)))
        return self.model.insert(namespace, path, pages.tolist())

    @rule(tokens=token_lists, namespace=namespaces)
    def publish_blindly(self, tokens: list[int], namespace: Namespace) -> None:
        """A request that did not match first: what is there already comes back as duplicates."""
        try:
            own = self.reserve(-(-len(tokens) // PAGE_SIZE))
        except OutOfPagesError:
            return
        path = self.model.cut(tokens)
        present = self.model.probe(namespace, path)
        result = self.cache.insert(key_of(tokens, namespace), own)
        assert result.pages.tolist() == self.insert(namespace, path, own)
        assert result.num_tokens == len(path) * PAGE_SIZE
        assert sum(count for _, count in result.duplicates) == present
        assert [first for first, _ in result.duplicates] == np.cumsum([0, *(n for _, n in result.duplicates)])[
            :-1
        ].tolist()
        self.rig.free_what_was_not_adopted(own, result)

    @rule(target=receipts, tokens=token_lists, namespace=namespaces)
    def serve(self, tokens: list[int], namespace: Namespace) -> object:
        """Match, lock, allocate the rest, publish, lock what was published, unlock what was matched."""
        key, path = key_of(tokens, namespace), self.model.cut(tokens)
        found, receipt, number = self.admit(tokens, namespace)
        try:
            own = self.reserve(-(-len(tokens) // PAGE_SIZE) - found.pages.size)
        except OutOfPagesError:
            return (receipt, number)
        pages = np.concatenate([found.pages, own])
        result = self.cache.insert(key, pages)
        assert result.pages.tolist() == self.insert(namespace, path, pages)
        self.rig.free_what_was_not_adopted(pages, result)
        longer, longer_number = self.cache.lock(result), self.model.lock(namespace, path)
        self.cache.unlock(receipt)
        self.model.unlock(number)
        return (longer, longer_number)

    def admit(self, tokens: list[int], namespace: Namespace) -> tuple[MatchResult, LockReceipt, int]:
        matched = self.model.match(namespace, self.model.cut(tokens[:-1]))
        found = self.cache.match(key_of(tokens, namespace))
        assert found.pages.tolist() == matched
        return found, self.cache.lock(found), self.model.lock(namespace, self.model.cut(tokens)[: len(matched)])

    @rule(target=receipts, tokens=token_lists, namespace=namespaces)
    def serve_from_the_lock(self, tokens: list[int], namespace: Namespace) -> object:
        """The same; what is published begins where the lock ends, which is moved."""
        _, receipt, number = self.admit(tokens, namespace)
        return self.publish_from(receipt, number, tokens, namespace)

    @rule(target=receipts, receipt=consumes(receipts), tokens=token_lists)
    def publish_more(self, receipt: tuple[LockReceipt, int], tokens: list[int]) -> object:
        mine, number = receipt
        if number not in self.model.locks:
            with pytest.raises(StaleHandleError):
                self.cache.insert(key_of(tokens), np.zeros(len(tokens), np.int32), after=mine)
            return receipt
        namespace, path = self.model.locks[number]
        longer = [*np.ravel(path).tolist(), *tokens][:HEAD_TOKENS]  # short enough to be shown whole
        return self.publish_from(mine, number, longer, namespace)

    def publish_from(self, receipt: LockReceipt, number: int, tokens: list[int], namespace: Namespace) -> object:
        path, first = self.model.cut(tokens), len(self.model.locks[number][1])
        try:
            own = self.reserve(-(-len(tokens) // PAGE_SIZE) - first)
        except OutOfPagesError:
            return (receipt, number)
        present = self.model.probe(namespace, path)
        pages = np.concatenate([np.zeros(first, np.int32), own])
        result = self.cache.insert(key_of(tokens, namespace), pages, after=receipt)
        assert result.pages.tolist() == self.insert(namespace, path, pages)[first:]
        assert (result.num_tokens, result.first) == (len(path) * PAGE_SIZE, first)
        assert [first, *(begin + count for begin, count in result.duplicates)] == [
            *(begin for begin, _ in result.duplicates),
            present,
        ]
        self.rig.free_what_was_not_adopted(own, result)
        longer_number = self.model.lock(namespace, path)
        self.model.unlock(number)
        return (self.cache.relock(receipt, result), longer_number)

    @rule(target=matches, tokens=token_lists, namespace=namespaces)
    def match(self, tokens: list[int], namespace: Namespace) -> object:
        path = self.model.cut(tokens[:-1])
        expected = self.model.match(namespace, path)
        found = self.cache.match(key_of(tokens, namespace))
        assert found.pages.tolist() == expected
        assert found.num_tokens == len(expected) * PAGE_SIZE
        self.check_reason(self.cache.explain_miss(key_of(tokens, namespace), found.num_tokens), tokens, namespace)
        if not expected:
            return multiple()
        return (found, namespace, path[: len(expected)])

    def check_reason(self, miss: Miss, tokens: list[int], namespace: Namespace) -> None:
        """Against all that the model holds, and all that was ever put into it."""
        path = self.model.cut(tokens[:-1])
        matched = self.model.probe(namespace, path)
        assert miss.num_matched == matched * PAGE_SIZE
        if matched == len(path):
            assert miss.reason == ("whole" if path else "short")
            return
        was_cached = (namespace, path[: matched + 1]) in self.ever_cached
        if miss.reason == "evicted":
            assert was_cached
            return
        assert not (was_cached and matched == 0), "below the root every eviction is known"
        if any(self.model.probe(node.namespace, path) > matched for node in self.model.nodes):
            assert miss.reason == "other_namespace"
            return
        same = tokens[: matched * PAGE_SIZE]
        cached = [np.ravel(node.path).tolist() for node in self.model.nodes if node.namespace == namespace]
        runs = [_run(tokens, ids) for ids in cached if ids[: len(same)] == same and len(ids) > len(same)]
        run = max(runs, default=0)
        if run:
            assert (miss.reason, miss.same_tokens, miss.prompt_goes_on[0]) == ("differs", run, tokens[run])
        else:
            assert miss.reason == ("ends" if matched else "unseen")

    @rule(tokens=token_lists, namespace=namespaces)
    def probe(self, tokens: list[int], namespace: Namespace) -> None:
        expected = self.model.probe(namespace, self.model.cut(tokens[:-1])) * PAGE_SIZE
        assert self.cache.probe(key_of(tokens, namespace)) == expected

    @rule(target=receipts, found=matches)
    def lock(self, found: tuple[MatchResult, Namespace, tuple[tuple[int, ...], ...]]) -> object:
        """Of a match taken some steps ago: locked if its node is still there, else refused."""
        match, namespace, path = found
        if match.node.epoch != self.tree.receipts.epoch:
            with pytest.raises(StaleHandleError):
                self.cache.lock(match)
            return multiple()
        assert (
            self.model.match(namespace, path)
            == match.pages.tolist()
            == self.cache.match(key_of([*np.ravel(path), 9], namespace)).pages.tolist()
        )
        return (self.cache.lock(match), self.model.lock(namespace, path))

    @rule(target=spent, receipt=consumes(receipts))
    def unlock(self, receipt: tuple[LockReceipt, int]) -> LockReceipt:
        mine, number = receipt
        if number in self.model.locks:
            self.cache.unlock(mine)
            self.model.unlock(number)
        else:
            with pytest.raises(StaleHandleError):
                self.cache.unlock(mine)
        return mine

    @rule(receipt=spent)
    def unlock_again(self, receipt: LockReceipt) -> None:
        with pytest.raises(StaleHandleError):
            self.cache.unlock(receipt)

    @rule(num_pages=st.integers(-1, NUM_PAGES + 1))
    def evict(self, num_pages: int) -> None:
        freed = self.model.evict(num_pages)
        assert self.cache.evict(num_pages) == len(freed)
        assert set(freed) <= set(self.rig.allocator.recorded_page_ids().tolist())

    @rule()
    def flush(self) -> None:
        if self.model.pages(locked=True):
            with pytest.raises(LockedPageError):
                self.cache.flush()
        else:
            assert self.cache.flush() == len(self.model.evict(NUM_PAGES))

    @rule(target=held, num_pages=st.integers(1, 3))
    def hold(self, num_pages: int) -> object:
        """A request's own pages, in nobody's tree."""
        try:
            pages = self.reserve(num_pages)
        except OutOfPagesError:
            return multiple()
        self.held_pages.append(pages)
        return pages

    @rule(pages=consumes(held))
    def let_go(self, pages: np.ndarray) -> None:
        if any(pages is mine for mine in self.held_pages):
            self.held_pages = [mine for mine in self.held_pages if mine is not pages]
            self.rig.allocator.port.free(pages)

    @rule()
    def lose_pool(self) -> None:
        self.rig.lose_pool()
        self.held_pages = []
        self.model.reset()
        self.ever_cached = set()

    @invariant()
    def content_order_and_locks_equal_the_list(self) -> None:
        evictable, protected = self.cache.cached_page_ids()
        assert set(evictable.tolist()) == self.model.pages(locked=False)
        assert set(protected.tolist()) == self.model.pages(locked=True)
        assert self.cache.evictable_pages == evictable.size
        assert self.cache.protected_pages == protected.size
        assert self.cache.num_nodes == len(self.model.nodes)
        assert [node.pages.tolist() for node in self.tree.order] == [node.pages for node in self.model.oldest_first]

    @invariant()
    def ledger_balances(self) -> None:
        self.rig.check(np.concatenate([np.empty(0, np.int32), *self.held_pages]))

    @invariant()
    def every_node_is_told(self) -> None:
        """Prefixes here are short enough to be shown whole."""
        top = self.cache.top_prefixes(NUM_PAGES)
        told = {(each.namespace, each.head, each.node_tokens, each.locked) for each in top.prefixes}
        assert told == {
            (
                node.namespace,
                tuple(np.ravel(node.path).tolist()),
                len(node.pages) * PAGE_SIZE,
                self.model.is_locked(node),
            )
            for node in self.model.nodes
        }
        assert top.complete

    @invariant()
    def listener_knows_what_the_tree_holds(self) -> None:
        self.replica.apply(self.recorder.drain())
        assert self.replica.page_hashes == self.model.page_hashes()


def _run(one: list[int], other: list[int]) -> int:
    """How many leading tokens are equal."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


class UnifiedTreeMachine(TreeMachine):
    cache_type = "unified_radix_cache"


TreeMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_tree_equals_the_list_model = TreeMachine.TestCase
UnifiedTreeMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
test_unified_tree_equals_the_list_model = UnifiedTreeMachine.TestCase


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["store", "match", "lock"]), token_lists, namespaces),
            st.tuples(st.just("evict"), st.integers(0, 9), st.none()),
            st.tuples(st.just("unlock"), st.none(), st.none()),
        ),
        max_size=60,
    )
)
def test_both_tree_caches_do_the_same(steps: list[tuple[str, Any, Any]]) -> None:
    """Behaviour 8: page for page, and node for node in the same order of eviction."""
    rigs = [CacheRig(name, num_pages=NUM_PAGES, page_size=PAGE_SIZE) for name in ("radix_cache", "unified_radix_cache")]
    receipts: list[list[LockReceipt]] = [[], []]
    for verb, what, namespace in steps:
        seen = [_step(rig, held, verb, what, namespace) for rig, held in zip(rigs, receipts, strict=True)]
        assert seen[0] == seen[1]
    for rig in rigs:
        rig.check()


def _step(rig: CacheRig, receipts: list[LockReceipt], verb: str, what: Any, namespace: Any) -> object:
    """Do it, and tell all that can be seen of it and after it."""
    cache = rig.cache
    told: object = None
    if verb == "store" and len(what) // PAGE_SIZE < rig.allocator.port.available():
        told = _told(rig.store(what, namespace))
    elif verb == "match":
        told = _told(cache.match(key_of(what, namespace)))
    elif verb == "lock":
        receipts.append(cache.lock(cache.match(key_of(what, namespace))))
    elif verb == "evict":
        told = cache.evict(what)
    elif verb == "unlock" and receipts:
        cache.unlock(receipts.pop())
    order = [(node.namespace, node.start, node.pages.tolist()) for node in cache._live_tree.order]
    return told, cache.num_nodes, cache.evictable_pages, cache.protected_pages, order, rig.allocator.port.available()


def _told(found: MatchResult | InsertResult) -> object:
    window, states = found.window_pages.tolist(), found.state
    return found.num_tokens, found.pages.tolist(), window, states
