"""UnifiedRadixCache with each set of components, and the allocators of its pools, against a flat list, step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from app.caches.base import NO_PAGES, InsertResult, LockReceipt, MatchResult
from app.caches.unified_radix_cache import UnifiedRadixCache
from app.config.model_config import Component
from app.core.keys import DEFAULT_NAMESPACE, Namespace
from app.errors import LockedPageError, OutOfPagesError, StaleHandleError
from app.observability.kv_events import KvEventRecorder, KvEventReplica
from tests.support.component_model import ComponentModel, Path
from tests.support.tree_model import CacheRig, key_of

PAGE_SIZE = 2
NUM_PAGES = 24
FULL, SWA, RECURRENT = Component

namespaces = st.sampled_from([DEFAULT_NAMESPACE, Namespace(salt="")])
token_lists = st.lists(st.integers(0, 1), max_size=15)
page_counts = st.integers(-1, 9)


class ComponentMachine(RuleBasedStateMachine):
    receipts = Bundle("receipts")
    spent = Bundle("spent")
    matches = Bundle("matches")
    components: frozenset[Component] = frozenset()

    @initialize(window=st.sampled_from([1, 2, 3, 4, 7]))
    def start(self, window: int) -> None:
        self.recorder = KvEventRecorder(page_size=PAGE_SIZE)
        self.replica = KvEventReplica()
        self.rig = CacheRig(
            "unified_radix_cache",
            components=self.components,
            window=window,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            events=self.recorder,
        )
        assert isinstance(self.rig.cache, UnifiedRadixCache)
        self.cache = self.rig.cache
        self.model = ComponentModel(
            PAGE_SIZE, window=window if self.rig.has_window else None, has_states=self.rig.has_states
        )

    def make_room(self, num_pages: int, num_window_pages: int, num_states: int) -> None:
        """Evict what is short in each pool, as a scheduler does."""
        shortfall = num_window_pages - self.rig.window_allocator.port.available()
        if shortfall > 0:
            assert self.cache.evict_window(shortfall) == self.model.evict_window(shortfall)
        shortfall = num_states - self.rig.state_allocator.port.available()
        if shortfall > 0:
            assert self.cache.evict_states(shortfall) == self.model.evict_states(shortfall)
        shortfall = num_pages - self.rig.allocator.port.available()
        if shortfall > 0:
            assert self.cache.evict(shortfall) == len(self.model.evict(shortfall))

    def publish(
        self, tokens: list[int], namespace: Namespace, pages: np.ndarray, window: np.ndarray, state: int
    ) -> Any:
        """Insert and compare, and free what was not adopted. -> the result."""
        path = self.model.cut(tokens)
        before = self.model.present(namespace, path)
        whole = tokens[: len(path) * PAGE_SIZE] if state else tokens
        expected = self.model.publish(namespace, path, len(whole), pages.tolist(), window[: len(path)].tolist(), state)
        result = self.cache.insert(key_of(whole, namespace), pages, window, state)
        assert result.pages.tolist() == expected.pages
        assert result.num_tokens == PAGE_SIZE * len(expected.pages)
        assert result.window_pages.tolist() == expected.window
        assert (result.state, result.state_adopted) == (expected.state, expected.state_adopted)
        assert sum(count for _, count in result.duplicates) == min(before, result.pages.size)
        self.free_what_was_not_adopted(pages, window, state, result)
        return result

    def free_what_was_not_adopted(
        self, pages: np.ndarray, window: np.ndarray, state: int, result: InsertResult
    ) -> None:
        """`pages`, `window`: from page index `result.first` on."""
        self.rig.free_what_was_not_adopted(pages, result)
        kept = np.zeros_like(window)
        kept[: result.window_pages.size] = result.window_pages
        self.rig.window_allocator.port.free(window[(window != kept) & (window != 0)])
        if state and not result.state_adopted:
            self.rig.state_allocator.port.free(np.array([state], np.int32))

    def take(self, num_pages: int, num_window_pages: int, *, with_state: bool) -> tuple[np.ndarray, np.ndarray, int]:
        """OutOfPagesError, and nothing is taken, if a pool is too small."""
        num_window_pages = num_window_pages if self.rig.has_window else 0
        num_states = int(with_state and self.rig.has_states)
        self.make_room(num_pages, num_window_pages, num_states)
        rig = self.rig
        for allocator, need in (
            (rig.allocator, num_pages),
            (rig.window_allocator, num_window_pages),
            (rig.state_allocator, num_states),
        ):
            if need > allocator.port.available():
                raise OutOfPagesError(need=need, free=allocator.port.available())
        state = rig.take_state() if num_states else 0
        return rig.take(num_pages), rig.take_window(num_window_pages), state

    @rule(tokens=token_lists, namespace=namespaces, retired=st.integers(0, 7), with_state=st.booleans())
    def publish_blindly(self, tokens: list[int], namespace: Namespace, retired: int, with_state: bool) -> None:
        """A request that did not match first and whose window has passed its first pages."""
        num_pages = len(tokens) // PAGE_SIZE
        retired = min(retired, num_pages)
        try:
            pages, own, state = self.take(num_pages, num_pages - retired, with_state=with_state and num_pages > 0)
        except OutOfPagesError:
            return
        window = np.concatenate([np.zeros(retired, np.int32), own]) if self.rig.has_window else NO_PAGES
        self.publish(tokens, namespace, pages, window, state)

    @rule(target=receipts, tokens=token_lists, namespace=namespaces, with_state=st.booleans())
    def serve(self, tokens: list[int], namespace: Namespace, with_state: bool) -> object:
        """Match, lock, allocate the rest, publish, lock what was published, unlock what was matched."""
        path = self.model.cut(tokens)
        found, receipt, number = self.admit(tokens, namespace)
        num_new = len(path) - found.pages.size
        try:
            pages, own, state = self.take(num_new, num_new, with_state=with_state and len(path) > 0)
        except OutOfPagesError:
            return (receipt, number)
        window = np.concatenate([found.window_pages, own])
        result = self.publish(tokens, namespace, np.concatenate([found.pages, pages]), window, state)
        longer = self.cache.lock(result)
        longer_number = self.model.lock_found(namespace, path[: result.pages.size])
        self.cache.unlock(receipt)
        self.model.unlock(number)
        return (longer, longer_number)

    def admit(self, tokens: list[int], namespace: Namespace) -> tuple[MatchResult, LockReceipt, int]:
        matched = self.model.match(namespace, self.model.cut(tokens[:-1]))
        path = self.model.cut(tokens)[: len(matched)]
        found = self.cache.match(key_of(tokens, namespace))
        self.check_match(found, namespace, path, matched)
        return found, self.cache.lock(found), self.model.lock_found(namespace, path)

    @rule(
        target=receipts, tokens=token_lists, namespace=namespaces, retired=st.integers(0, 7), with_state=st.booleans()
    )
    def serve_from_the_lock(self, tokens: list[int], namespace: Namespace, retired: int, with_state: bool) -> object:
        """The same; what is published begins where the lock ends, which is moved."""
        _, receipt, number = self.admit(tokens, namespace)
        return self.publish_from(receipt, number, tokens, namespace, retired, with_state)

    @rule(
        target=receipts,
        receipt=consumes(receipts),
        tokens=token_lists,
        retired=st.integers(0, 7),
        with_state=st.booleans(),
    )
    def publish_more(
        self, receipt: tuple[LockReceipt, int], tokens: list[int], retired: int, with_state: bool
    ) -> object:
        mine, number = receipt
        if number not in self.model.locks:
            with pytest.raises(StaleHandleError):
                self.cache.insert(key_of([]), NO_PAGES, after=mine)
            return receipt
        namespace, path = self.model.locks[number]
        return self.publish_from(
            mine, number, [*np.ravel(path).astype(int).tolist(), *tokens], namespace, retired, with_state
        )

    def publish_from(
        self, receipt: LockReceipt, number: int, tokens: list[int], namespace: Namespace, retired: int, with_state: bool
    ) -> object:
        """retired: of the pages behind the lock, those that the caller's window has passed."""
        path, first = self.model.cut(tokens), len(self.model.locks[number][1])
        num_new = len(path) - first
        retired = min(retired, num_new)
        try:
            own, live, state = self.take(num_new, num_new - retired, with_state=with_state and num_new > 0)
        except OutOfPagesError:
            return (receipt, number)
        pages, window = np.concatenate([np.zeros(first, np.int32), own]), NO_PAGES
        if self.rig.has_window:
            window = np.concatenate([np.zeros(first + retired, np.int32), live])
        whole = tokens[: len(path) * PAGE_SIZE] if state else tokens
        published = self.model.longest_publication(namespace, path, window.tolist(), state)
        result = self.cache.insert(key_of(whole, namespace), pages, window, state, receipt)
        if published <= first:
            assert (result.num_tokens, result.first, result.pages.size) == (first * PAGE_SIZE, first, 0)
            assert not result.state_adopted
        else:
            before = self.model.present(namespace, path)
            expected = self.model.publish(namespace, path, len(whole), pages.tolist(), window.tolist(), state, first)
            assert (result.num_tokens, result.first) == (len(expected.pages) * PAGE_SIZE, first)
            assert result.pages.tolist() == expected.pages[first:]
            assert result.window_pages.tolist() == expected.window[first:]
            assert (result.state, result.state_adopted) == (expected.state, expected.state_adopted)
            assert sum(count for _, count in result.duplicates) == min(before, published) - first
        self.free_what_was_not_adopted(own, window[first:], state, result)
        if published <= first:
            return (receipt, number)
        longer_number = self.model.lock_found(namespace, path[:published])
        self.model.unlock(number)
        return (self.cache.relock(receipt, result), longer_number)

    @rule(target=matches, tokens=token_lists, namespace=namespaces)
    def match(self, tokens: list[int], namespace: Namespace) -> object:
        path = self.model.cut(tokens[:-1])
        expected = self.model.match(namespace, path)
        found = self.cache.match(key_of(tokens, namespace))
        self.check_match(found, namespace, path[: len(expected)], expected)
        miss = self.cache.explain_miss(key_of(tokens, namespace), found.num_tokens)
        assert miss.num_matched == found.num_tokens
        cached_but_unusable = self.model.present(namespace, path) > len(expected)
        assert (miss.reason == "incomplete") == cached_but_unusable, miss
        assert set(miss.lacking) <= self.components
        return (found, namespace, path[: len(expected)]) if expected else multiple()

    def check_match(self, found: MatchResult, namespace: Namespace, path: Path, pages: list[int]) -> None:
        assert (found.pages.tolist(), found.num_tokens) == (pages, PAGE_SIZE * len(pages))
        assert found.window_pages.tolist() == self.model.named_window(namespace, path)
        assert found.state == (self.model.state_at(namespace, path) if path else 0)

    @rule(tokens=token_lists, namespace=namespaces)
    def probe(self, tokens: list[int], namespace: Namespace) -> None:
        expected = self.model.probe(namespace, self.model.cut(tokens[:-1])) * PAGE_SIZE
        assert self.cache.probe(key_of(tokens, namespace)) == expected

    @rule(target=receipts, found=matches)
    def lock(self, found: tuple[MatchResult, Namespace, Path]) -> object:
        """Of a match taken some steps ago: locked if all that it names is still there, else refused."""
        match, namespace, path = found
        gone = (
            match.node.epoch != self.cache._live_tree.receipts.epoch
            or match.window_pages.tolist() != self.model.named_window(namespace, path)
            or match.state != self.model.state_at(namespace, path)
        )
        if gone:
            with pytest.raises(StaleHandleError):
                self.cache.lock(match)
            return multiple()
        return (self.cache.lock(match), self.model.lock_found(namespace, path))

    @rule(receipt=receipts)
    def unlock_window(self, receipt: tuple[LockReceipt, int]) -> None:
        mine, number = receipt
        if number in self.model.component_locks:
            self.cache.unlock_window(mine)
            self.model.unlock_window(number)
        else:
            with pytest.raises(StaleHandleError):
                self.cache.unlock_window(mine)

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

    @rule(num_pages=page_counts)
    def evict(self, num_pages: int) -> None:
        assert self.cache.evict(num_pages) == len(self.model.evict(num_pages))

    @rule(num_pages=page_counts)
    def evict_window(self, num_pages: int) -> None:
        assert self.cache.evict_window(num_pages) == self.model.evict_window(num_pages)

    @rule(num_states=page_counts)
    def evict_states(self, num_states: int) -> None:
        assert self.cache.evict_states(num_states) == self.model.evict_states(num_states)

    @rule()
    def flush(self) -> None:
        if self.model.pages(locked=True):
            with pytest.raises(LockedPageError):
                self.cache.flush()
        else:
            assert self.cache.flush() == len(self.model.evict(NUM_PAGES))

    @rule()
    def lose_pools(self) -> None:
        self.rig.lose_pool()
        self.model.reset()

    @invariant()
    def content_order_and_locks_equal_the_list(self) -> None:
        cache, model = self.cache, self.model
        evictable, protected = cache.cached_page_ids()
        assert set(evictable.tolist()) == model.pages(locked=False)
        assert set(protected.tolist()) == model.pages(locked=True)
        assert (cache.evictable_pages, cache.protected_pages) == (evictable.size, protected.size)
        assert cache.num_nodes == len(model.nodes)
        order = cache._live_tree.order
        assert [node.pages.tolist() for node in order] == [node.pages for node in model.oldest_first]

    @invariant()
    def parts_equal_the_list(self) -> None:
        cache, model = self.cache, self.model
        evictable, protected = cache.cached_window_page_ids()
        unlocked = [page for node, pages in model.windows.items() if not model.window_locked(node) for page in pages]
        locked = [page for node, pages in model.windows.items() if model.window_locked(node) for page in pages]
        assert (sorted(evictable.tolist()), sorted(protected.tolist())) == (sorted(unlocked), sorted(locked))
        assert (cache.evictable_window_pages, cache.protected_window_pages) == (len(unlocked), len(locked))
        evictable, protected = cache.cached_states()
        free = {state for node, state in model.snapshots.items() if not model.state_locked(node)}
        assert (set(evictable.tolist()), set(np.concatenate([evictable, protected]).tolist())) == (
            free,
            set(model.snapshots.values()),
        )
        assert (cache.evictable_states, cache.protected_states) == (evictable.size, protected.size)
        if cache._window is not None:
            assert [cache._window.parts[node].ids.tolist() for node in cache._window.order] == [
                model.windows[node] for node in (*model.unused_windows, *model.windows_oldest_first)
            ]
        if cache._states is not None:
            assert [cache._states.state_of(node) for node in cache._states.order] == [
                model.snapshots[node] for node in model.snapshots_oldest_first
            ]

    @invariant()
    def every_ledger_balances(self) -> None:
        self.rig.check()

    @invariant()
    def listener_knows_what_the_tree_holds(self) -> None:
        self.replica.apply(self.recorder.drain())
        assert self.replica.page_hashes == self.model.page_hashes()


def _machine(*components: Component) -> type[RuleBasedStateMachine]:
    name = "+".join(component.value for component in components)
    return type(name, (ComponentMachine,), {"components": frozenset(components)})


@pytest.mark.parametrize(
    "components",
    [(FULL,), (SWA,), (FULL, SWA), (RECURRENT,), (FULL, RECURRENT), (FULL, SWA, RECURRENT)],
    ids=lambda components: "+".join(component.value for component in components),
)
def test_the_tree_with_components_equals_the_list_model(components: tuple[Component, ...]) -> None:
    run_state_machine_as_test(
        _machine(*components), settings=settings(max_examples=40, stateful_step_count=40, deadline=None)
    )
