"""Every eviction policy: the laws of an order, against a list searched from end to end; and what each policy is for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.caches.radix_cache import RadixCache
from app.caches.tree.evicted import EvictionMemory
from app.caches.tree.node import TreeNode
from app.caches.tree.policies.choice import EVICTION_ORDERS, make_eviction_order
from app.caches.tree.policies.hit_density import NUM_BINS, NUM_CLASSES, ReuseRates, age_bin, use_class
from app.caches.tree.policies.order import EvictionOrder
from app.config.server_args import ServerArgs
from app.core.keys import DEFAULT_NAMESPACE, RadixKey
from app.core.sampling import SamplingParams
from app.errors import ConfigError, IntegrityError
from app.scheduling.request import Request, Sequence
from tests.support.tree_model import CacheRig, key_of

PAGE = 4
POLICIES = list(EVICTION_ORDERS)


# -- the laws ----------------------------------------------------------------------------------------------------------


class ListOrder:
    """Nodes with the rank that they had when they were last used, the least recent first."""

    def __init__(self, rank: Callable[[TreeNode], int]) -> None:
        self.rank = rank
        self.entries: list[tuple[TreeNode, int]] = []

    def add(self, node: TreeNode) -> None:
        self.entries.append((node, self.rank(node)))

    def split(self, lower: TreeNode, upper: TreeNode) -> None:
        self.add(upper)

    def remove(self, node: TreeNode) -> None:
        self.entries = [entry for entry in self.entries if entry[0] is not node]

    def touch(self, node: TreeNode) -> None:
        self.remove(node)
        self.add(node)

    def nodes(self) -> list[TreeNode]:
        """Next to be evicted first."""
        return [node for node, _ in sorted(self.entries, key=lambda entry: entry[1])]

    def pop(self) -> TreeNode:
        node = self.nodes()[0]
        self.remove(node)
        return node


class ListHitDensity(ListOrder):
    """The same for hit_density: the rank is what the rates say of the node's class and age."""

    def __init__(self) -> None:
        super().__init__(use_class)
        self.rates = ReuseRates()
        self.now = 0
        self.since: dict[TreeNode, int] = {}

    def add(self, node: TreeNode) -> None:
        self.now += node.pages.size
        self.begin(node)

    def begin(self, node: TreeNode) -> None:
        super().add(node)
        self.since[node] = self.now

    def split(self, lower: TreeNode, upper: TreeNode) -> None:
        self.end(lower, reused=True)
        self.begin(upper)

    def touch(self, node: TreeNode) -> None:
        lived_as = self.rank_of(node)
        self.remove(node)
        self.end(node, reused=True, lived_as=lived_as)
        self.begin(node)

    def nodes(self) -> list[TreeNode]:
        def rank(entry: tuple[TreeNode, int]) -> tuple[float, int]:
            node, lived_as = entry
            return self.rates.worth[lived_as][age_bin(self.now - self.since[node])], lived_as

        return [node for node, _ in sorted(self.entries, key=rank)]

    def pop(self) -> TreeNode:
        node = self.nodes()[0]
        lived_as = self.rank_of(node)
        self.remove(node)
        self.end(node, reused=False, lived_as=lived_as)
        return node

    def rank_of(self, node: TreeNode) -> int:
        return next(lived_as for other, lived_as in self.entries if other is node)

    def end(self, node: TreeNode, *, reused: bool, lived_as: int | None = None) -> None:
        age = self.now - self.since[node]
        if age == 0:
            return
        self.rates.record(self.rank_of(node) if lived_as is None else lived_as, age, reused=reused)
        if self.rates.due <= 0:
            ages = [[self.now - self.since[n] for n, as_ in self.entries if as_ == c] for c in range(NUM_CLASSES)]
            self.rates.learn([np.array(of_class, np.float64) for of_class in ages])


MODELS: dict[str, Callable[[], ListOrder]] = {
    "lru": lambda: ListOrder(lambda node: 0),
    "lfu": lambda: ListOrder(lambda node: node.hits + node.past_uses),
    "slru": lambda: ListOrder(lambda node: 1 if node.hits + node.past_uses else 0),
    "priority": lambda: ListOrder(lambda node: -node.priority),
    "hit_density": ListHitDensity,
}


def new_node(parent: TreeNode | None, *, num_pages: int = 1, past_uses: int = 0, priority: int = 0) -> TreeNode:
    return TreeNode(
        parent=parent,
        namespace=DEFAULT_NAMESPACE,
        edge=bytes(4 * num_pages),
        pages=np.arange(num_pages, dtype=np.int32),
        epoch=0,
        start=0,
        serial=0,
        hits=0,
        used_at=0.0,
        past_uses=past_uses,
        priority=priority,
    )


class Forest:
    """Nodes used, locked, split and evicted as a tree does it, with an order and its model told of everything."""

    def __init__(self, policy: str) -> None:
        self.order: EvictionOrder = EVICTION_ORDERS[policy]()
        self.model = MODELS[policy]()
        self.root = new_node(None)
        self.nodes: list[TreeNode] = []
        self.names = itertools.count()

    def grow(self, parent: TreeNode, num_pages: int, past_uses: int, priority: int) -> None:
        self.use(parent, 0, priority)
        known = past_uses if parent is self.root else min(past_uses, parent.uses)
        leaf = new_node(parent, num_pages=num_pages, past_uses=known, priority=priority)
        parent.children[next(self.names).to_bytes(4)] = leaf
        self.nodes.append(leaf)
        self.tell("add", leaf)
        self.use(leaf, 0, priority)

    def use(self, node: TreeNode, hits: int, priority: int) -> None:
        for at in self.path(node):
            at.hits += hits
            at.priority = min(at.priority, priority)
            if not at.lock_ref:
                self.tell("touch", at)

    def lock(self, node: TreeNode) -> None:
        for at in self.path(node):
            if not at.lock_ref:
                self.tell("remove", at)
            at.lock_ref += 1

    def unlock(self, node: TreeNode) -> None:
        for at in self.path(node):
            at.lock_ref -= 1
            if not at.lock_ref:
                self.tell("add", at)

    def split(self, lower: TreeNode) -> None:
        if lower.pages.size < 2 or lower.lock_ref:
            return
        parent = lower.parent
        assert parent is not None
        upper = new_node(parent, past_uses=lower.past_uses, priority=lower.priority)
        upper.hits = lower.hits
        name = next(name for name, child in parent.children.items() if child is lower)
        parent.children[name] = upper
        upper.children[name] = lower
        lower.parent, lower.pages = upper, lower.pages[1:]
        self.nodes.append(upper)
        self.order.split(lower, upper)
        self.model.split(lower, upper)
        self.use(upper, 1, upper.priority)

    def evict(self) -> None:
        if not self.model.entries:
            with pytest.raises(KeyError):
                self.order.pop()
            return
        leaf = self.order.pop()
        assert leaf is self.model.pop()
        assert not leaf.children
        assert leaf.parent is not None
        leaf.parent.children = {name: child for name, child in leaf.parent.children.items() if child is not leaf}
        self.nodes.remove(leaf)

    def tell(self, verb: str, node: TreeNode) -> None:
        getattr(self.order, verb)(node)
        getattr(self.model, verb)(node)

    def path(self, node: TreeNode) -> Iterator[TreeNode]:
        while node.parent is not None:
            above = node.parent
            yield node
            node = above

    def check(self) -> None:
        expected = self.model.nodes()
        assert list(self.order) == expected
        assert list(reversed(self.order)) == expected[::-1]
        assert len(self.order) == len(expected)
        position = {node: index for index, node in enumerate(expected)}
        assert all(position.get(node.parent, len(expected)) > index for node, index in position.items())


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
def test_an_order_over_a_tree_equals_a_list_and_evicts_leaves_first(policy: str, data: st.DataObject) -> None:
    forest = Forest(policy)
    locked: list[TreeNode] = []
    for verb in data.draw(st.lists(st.sampled_from("ggguuulxsee"), max_size=40)):
        node = data.draw(st.sampled_from([forest.root, *forest.nodes])) if verb in "guls" else forest.root
        if verb == "g":
            pages, past, priority = (data.draw(st.integers(low, 3)) for low in (1, 0, -3))
            forest.grow(node, pages, past, priority)
        elif verb == "u":
            forest.use(node, 1, data.draw(st.integers(-3, 3)))
        elif verb == "l":
            forest.lock(node)
            locked.append(node)
        elif verb == "x" and locked:
            forest.unlock(locked.pop())
        elif verb == "s" and node is not forest.root:
            forest.split(node)
        elif verb == "e":
            forest.evict()
        forest.check()
    for node in locked:
        forest.unlock(node)
    while forest.nodes:
        forest.evict()
        forest.check()
    forest.evict()


@pytest.mark.parametrize("policy", POLICIES)
@given(told=st.lists(st.tuples(st.sampled_from("atrp"), st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_an_order_takes_nodes_in_any_sequence_and_pops_the_least(policy: str, told: list[tuple[str, int, int]]) -> None:
    """As an order of window pages or of snapshots does, which holds any nodes of a tree."""
    # given
    order, model = EVICTION_ORDERS[policy](), MODELS[policy]()
    nodes = [new_node(None, num_pages=count + 1) for count in range(6)]
    inside: set[TreeNode] = set()

    for verb, index, more in told:
        node = nodes[index]
        if verb == "p" and inside:
            popped = order.pop()
            assert popped is model.pop()
            inside.remove(popped)
        elif verb == "a" and node not in inside:
            for each in (order, model):
                each.add(node)
            inside.add(node)
        elif verb in "tr" and node in inside:
            if verb == "t":
                node.hits += more
                node.priority -= more
                order.touch(node)
                model.touch(node)
            else:
                order.remove(node)
                model.remove(node)
                inside.remove(node)

        # then, after each
        assert list(order) == model.nodes()
        assert list(reversed(order)) == model.nodes()[::-1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cleared_order_is_empty_and_takes_nodes_again(policy: str) -> None:
    # given
    order = EVICTION_ORDERS[policy]()
    nodes = [new_node(None) for _ in range(5)]
    for node in nodes:
        order.add(node)

    # when
    order.clear()

    # then
    assert (len(order), list(order), list(reversed(order))) == (0, [], [])
    with pytest.raises(KeyError):
        order.pop()
    order.add(nodes[3])
    assert order.pop() is nodes[3]


@pytest.mark.parametrize("policy", POLICIES)
def test_an_order_keeps_nothing_of_nodes_that_left(policy: str) -> None:
    """Ranks climb for as long as a server runs."""
    order = EVICTION_ORDERS[policy]()
    node = new_node(None)
    for uses in range(2000):
        node.hits = uses
        node.priority = -uses
        order.add(node)
        order.touch(node)
        order.remove(node)
    assert len(order) == 0
    held = [getattr(order, slot) for slot in ("_queues", "_ranks", "_rank_of", "_class_of") if hasattr(order, slot)]
    assert all(len(holder) <= 40 for holder in held)


# -- in the tree -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@given(data=st.data())
def test_a_cache_is_whole_under_every_policy(policy: str, data: st.DataObject) -> None:
    # given
    rig = CacheRig("radix_cache", num_pages=16, page_size=2, eviction_policy=policy)
    receipts = []
    for verb in data.draw(st.lists(st.sampled_from("sssmmluee"), max_size=30)):
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=9)) if verb in "sml" else []
        key = RadixKey(key_of(tokens).raw, DEFAULT_NAMESPACE, data.draw(st.integers(-1, 1)))
        if verb == "s":
            shortfall = -(-len(key) // 2) - rig.allocator.port.available()
            rig.cache.evict(shortfall)
            if shortfall > 0 and rig.allocator.port.available() < -(-len(key) // 2):
                continue
            own = rig.take(-(-len(key) // 2))
            rig.free_what_was_not_adopted(own, rig.cache.insert(key, own))
        elif verb == "m":
            rig.cache.match(key)
        elif verb == "l":
            receipts.append(rig.cache.lock(rig.cache.match(key)))
        elif verb == "u" and receipts:
            rig.cache.unlock(receipts.pop())
        elif verb == "e":
            rig.cache.evict(1)
        rig.check()
    for receipt in receipts:
        rig.cache.unlock(receipt)
    rig.cache.flush()
    rig.check()
    assert rig.allocator.port.available() == 16


def kept(policy: str, *, times: dict[int, int], evict: int) -> list[int]:
    """Which of the prefixes are left: stored in the order given, each then matched so many times, and pages evicted."""
    rig = CacheRig("radix_cache", page_size=PAGE, eviction_policy=policy)
    for prefix in times:
        rig.store([prefix] * PAGE)
    for prefix, count in times.items():
        for _ in range(count):
            rig.matched([prefix] * (PAGE + 1))
    rig.cache.evict(evict)
    rig.check()
    return [prefix for prefix in times if rig.cache.probe(key_of([prefix] * (PAGE + 1)))]


def test_lfu_evicts_what_was_used_least_often() -> None:
    assert kept("lfu", times={1: 3, 2: 1, 3: 2, 4: 1}, evict=2) == [1, 3]
    assert kept("lru", times={1: 3, 2: 1, 3: 2, 4: 1}, evict=2) == [3, 4]


def test_slru_evicts_what_was_never_used_again_and_then_the_oldest() -> None:
    assert kept("slru", times={1: 1, 2: 0, 3: 5, 4: 0}, evict=2) == [1, 3]
    assert kept("slru", times={1: 5, 2: 0, 3: 1, 4: 0}, evict=3) == [3]


def test_priority_evicts_what_no_urgent_request_used() -> None:
    # given a prefix shared by an urgent request and a patient one, and one of a patient request alone, used last
    rig = CacheRig("radix_cache", page_size=PAGE, eviction_policy="priority")

    def store(tokens: list[int], priority: int) -> None:
        key = RadixKey.of(np.array(tokens, np.int32), DEFAULT_NAMESPACE, priority)
        own = rig.take(len(tokens) // PAGE)
        rig.free_what_was_not_adopted(own, rig.cache.insert(key, own))

    store([1] * PAGE + [2] * PAGE, 5)
    store([1] * PAGE + [3] * PAGE, -5)
    store([4] * PAGE, 0)
    store([5] * PAGE, 0)

    # when
    rig.cache.evict(3)

    # then
    rig.check()
    assert rig.matched([1] * PAGE + [3] * PAGE + [0]) == 2 * PAGE
    assert rig.matched([1] * PAGE + [2] * PAGE + [0]) == PAGE
    assert rig.matched([4] * PAGE + [0]) == rig.matched([5] * PAGE + [0]) == 0


def test_a_match_by_an_urgent_request_raises_the_whole_path() -> None:
    # given
    rig = CacheRig("radix_cache", page_size=PAGE, eviction_policy="priority")
    rig.store(range(2 * PAGE))
    rig.store([7] * PAGE)

    # when
    rig.cache.match(RadixKey.of(np.arange(2 * PAGE + 1, dtype=np.int32), DEFAULT_NAMESPACE, -1))
    rig.store([8] * PAGE)
    rig.cache.evict(2)

    # then
    rig.check()
    assert rig.matched(range(2 * PAGE + 1)) == 2 * PAGE


def test_the_head_of_a_key_is_as_urgent_as_the_key() -> None:
    assert RadixKey(bytes(16), DEFAULT_NAMESPACE, -3).head(2).priority == -3


def test_every_key_of_a_request_is_as_urgent_as_the_request() -> None:
    # given
    params = SamplingParams(seed=0)
    request = Request(request_id="r", prompt_token_ids=np.arange(3, dtype=np.int32), sampling=params, priority=-7)
    sequence = Sequence(request, params, 0)

    # when
    waiting = sequence.key
    sequence.output.append(5)
    settled = sequence.settled_key(4)
    sequence.rekey()

    # then
    assert [key.priority for key in (waiting, settled, sequence.key)] == [-7, -7, -7]


def test_a_prefix_that_comes_back_after_an_eviction_counts_as_used_again() -> None:
    # given
    rig = CacheRig("radix_cache", page_size=PAGE, eviction_policy="slru")
    rig.store([1] * PAGE)
    rig.cache.evict(1)

    # when
    rig.store([1] * PAGE)
    rig.store([2] * PAGE)
    rig.cache.evict(1)

    # then
    rig.check()
    assert rig.matched([1] * (PAGE + 1)) == PAGE


def test_uses_are_remembered_over_an_eviction_but_never_more_than_those_of_the_prefix_before() -> None:
    # given a node and one below it, which alone is used often and evicted
    rig = CacheRig("radix_cache", page_size=PAGE)
    assert isinstance(rig.cache, RadixCache)
    rig.store(range(PAGE))
    rig.store(range(2 * PAGE))
    for _ in range(3):
        rig.matched(range(2 * PAGE + 1))
    rig.cache.evict(1)

    # when it comes back, without a look at what is there
    rig.store(range(2 * PAGE))

    # then
    rig.check()
    upper, lower = rig.cache._live_tree.nodes()
    assert (upper.hits, upper.past_uses, lower.hits, lower.past_uses) == (3, 0, 0, 3)


def test_the_memory_of_evictions_tells_uses() -> None:
    # given
    memory = EvictionMemory()

    # when
    memory.remember(1, b"page", 5.0, 2)

    # then
    assert (memory.when(1, b"page"), memory.uses(1, b"page")) == (5.0, 3)
    assert (memory.when(1, b"other"), memory.uses(1, b"other")) == (None, 0)


def test_integrity_check_finds_a_child_above_its_parent() -> None:
    rig = CacheRig("radix_cache", page_size=PAGE)
    assert isinstance(rig.cache, RadixCache)
    rig.store(range(PAGE))
    rig.store(range(2 * PAGE))
    _, lower = rig.cache._live_tree.nodes()
    lower.past_uses = 1
    with pytest.raises(IntegrityError, match="used more often"):
        rig.cache.check_integrity()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_chosen_for_a_server(policy: str) -> None:
    assert ServerArgs(eviction_policy=policy).eviction_policy == policy
    assert len(make_eviction_order(policy)) == 0


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="eviction_policy='random' is not allowed: one of lru, lfu, slru, priority"):
        make_eviction_order("random")


# -- hit density -------------------------------------------------------------------------------------------------------


@given(
    lives=st.lists(
        st.tuples(st.integers(0, NUM_CLASSES - 1), st.integers(1, 1 << 40), st.booleans()), min_size=1, max_size=300
    ),
    living=st.lists(st.integers(0, 1 << 40), max_size=20),
)
def test_worth_never_grows_with_age_and_never_falls_with_uses(
    lives: list[tuple[int, int, bool]], living: list[int]
) -> None:
    """By which a node is never worth more than one above it."""
    # given
    rates = ReuseRates()
    for lived_as, age, reused in lives:
        rates.record(lived_as, age, reused=reused)

    # when
    rates.learn([np.array(living, np.float64)] * NUM_CLASSES)

    # then
    worth = np.array(rates.worth)
    assert worth.shape == (NUM_CLASSES, NUM_BINS)
    assert (worth > 0).all()
    assert (np.diff(worth, axis=1) <= 0).all()
    assert (np.diff(worth, axis=0) >= 0).all()


def test_rates_are_those_of_the_lives_that_were_told() -> None:
    # given 1000 lives, each ended by a use with a chance of 1 in 100 a page, or by an eviction at 400
    rates = ReuseRates()
    random = np.random.default_rng(0)
    for age in random.geometric(0.01, 1000):
        rates.record(0, min(int(age), 400), reused=bool(age < 400))

    # when
    rates.learn([np.empty(0)] * NUM_CLASSES)

    # then
    assert rates.worth[0][age_bin(50)] == pytest.approx(0.01, rel=0.25)
    assert rates.worth[0][age_bin(300)] == pytest.approx(0.01, rel=0.25)


def test_nodes_that_live_on_unused_lower_the_rate() -> None:
    # given
    rates = ReuseRates()
    for _ in range(100):
        rates.record(0, 100, reused=True)
    rates.learn([np.empty(0)] * NUM_CLASSES)
    before = rates.worth[0][age_bin(100)]

    # when
    rates.learn([np.full(300, 120.0), *[np.empty(0)] * (NUM_CLASSES - 1)])

    # then
    assert rates.worth[0][age_bin(100)] < before / 2


@pytest.mark.parametrize("age", [0, 1, 2, 3, 4, 1023, 1024, 1 << 46, 1 << 60])
def test_bins_of_age_double(age: int) -> None:
    assert age_bin(age) == min(len(f"{age:b}") if age else 0, NUM_BINS - 1)


def hits(policy: str, requests: list[int], num_pages: int) -> int:
    rig = CacheRig("radix_cache", num_pages=num_pages, page_size=1, eviction_policy=policy)
    found = 0
    for request in requests:
        found += rig.matched([request, 0])
        rig.cache.evict(1 - rig.allocator.port.available())
        rig.store([request])
    rig.check()
    return found


def test_hit_density_learns_that_what_was_used_twice_comes_again_and_a_scan_does_not() -> None:
    # given 30 prefixes, each asked for once in a while, between prompts that never come again
    random = np.random.default_rng(0)
    once = itertools.count(1000)
    requests = [int(random.integers(30)) if random.random() < 0.4 else next(once) for _ in range(4000)]

    # when there is room for them, but not for all that comes between two uses
    lru, learned = hits("lru", requests, 40), hits("hit_density", requests, 40)

    # then
    assert learned > 1.3 * lru


def test_hit_density_learns_anew_when_the_traffic_changes() -> None:
    # given traffic in which what was used once is used again; then the same from other prefixes
    random = np.random.default_rng(1)
    once = itertools.count(100_000)
    requests = [
        phase * 1000 + int(random.integers(30)) if random.random() < 0.4 else next(once)
        for phase in range(3)
        for _ in range(2000)
    ]

    # then what is left of the phase before does not stay in the way
    assert hits("hit_density", requests, 40) > 1.2 * hits("lru", requests, 40)
