"""The comparison of eviction policies: its bound is one, and its LRU is the one of the plain simulation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.bench.policies import format_policies_bench, most_hits, run_policies_bench
from app.bench.trace import read_mooncake_trace
from app.caches.tree.policies.choice import EVICTION_ORDERS
from app.core.keys import DEFAULT_NAMESPACE
from app.errors import ConfigError
from tests.support.tree_model import ListModel

SAMPLE = Path(__file__).parents[2] / "data" / "mooncake_sample.jsonl"

# Three short prompts that share some of a tree: a page's number tells the pages before it.
CHAINS = [(0,), (0, 1), (0, 2), (3,), (3, 4), (5,)]


def best_of_all_choices(prompts: Sequence[tuple[int, ...]], num_pages: int) -> int:
    """Hits of the best of every way to keep some of what a prompt leaves behind."""
    states: dict[frozenset[int], int] = {frozenset(): 0}
    for prompt in prompts:
        after: dict[frozenset[int], int] = {}
        for kept, hits in states.items():
            found = len(list(itertools.takewhile(kept.__contains__, prompt)))
            pages = kept | set(prompt)
            for size in range(min(num_pages, len(pages)) + 1):
                for choice in itertools.combinations(sorted(pages), size):
                    state = frozenset(choice)
                    after[state] = max(after.get(state, 0), hits + found)
        states = after
    return max(states.values())


@settings(max_examples=60)
@given(prompts=st.lists(st.sampled_from(CHAINS), min_size=1, max_size=7), num_pages=st.integers(1, 3))
def test_the_bound_is_the_best_of_all_choices(prompts: list[tuple[int, ...]], num_pages: int) -> None:
    as_arrays = [np.array(prompt, np.int32) for prompt in prompts]
    assert most_hits(as_arrays, num_pages) == best_of_all_choices(prompts, num_pages)


def test_every_policy_is_replayed_beside_the_bound() -> None:
    # when
    result = run_policies_bench(SAMPLE, pool_fractions=(0.2, 0.5, 1.0))

    # then
    ideal = 1 - result["distinct_blocks"] / result["num_blocks"]
    for pool in result["pools"]:
        assert list(pool["hit_rates"]) == list(EVICTION_ORDERS) == list(pool["cpu_us_a_request"])
        assert all(0 < rate <= pool["bound"] <= ideal + 1e-12 for rate in pool["hit_rates"].values())
        assert all(cost > 0 for cost in pool["cpu_us_a_request"].values())
    whole = result["pools"][-1]
    assert [*whole["hit_rates"].values(), whole["bound"]] == pytest.approx([ideal] * (len(EVICTION_ORDERS) + 1))
    text = format_policies_bench(result)
    assert all(name in text for name in (*EVICTION_ORDERS, "bound", "pool 20%"))


def test_lru_is_that_of_a_plain_simulation() -> None:
    # given
    prompts = [tuple((block,) for block in request.block_ids) for request in read_mooncake_trace(SAMPLE, None)]
    num_pages = int(0.2 * len(set(itertools.chain(*prompts))))
    model = ListModel(1)
    free = num_pages
    hits = 0

    # when
    for prompt in prompts:
        matched = len(model.match(DEFAULT_NAMESPACE, prompt))
        hits += matched
        lock = model.lock(DEFAULT_NAMESPACE, prompt[:matched])
        free += len(model.evict(len(prompt) - matched - free)) - (len(prompt) - matched)
        model.insert(DEFAULT_NAMESPACE, prompt, [0] * len(prompt))
        model.unlock(lock)

    # then
    (pool,) = run_policies_bench(SAMPLE, pool_fractions=(0.2,), policies=("lru",))["pools"]
    assert pool["num_pages"] == num_pages
    assert pool["hit_rates"] == {"lru": pytest.approx(hits / sum(map(len, prompts)), rel=1e-12)}


def test_a_pool_smaller_than_a_prompt_is_refused_naming_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--pool-fraction=0\.01.*longest prompt"):
        run_policies_bench(SAMPLE, pool_fractions=(0.01,))
