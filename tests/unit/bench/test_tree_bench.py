"""The replay of a trace: its hit rate is that of a plain simulation, and it serves every registered type."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.bench import tree as bench
from app.bench.component_replay import components_named, replay_of
from app.bench.trace import BLOCK_TOKENS, TraceRequest, read_mooncake_trace, working_set_tokens
from app.caches.builtin import load_builtin_caches
from app.caches.registry import default_registry
from app.core.keys import DEFAULT_NAMESPACE
from app.errors import ConfigError, UnknownCacheTypeError
from tests.support.tree_model import ListModel, Page

SAMPLE = Path(__file__).parents[2] / "data" / "mooncake_sample.jsonl"
load_builtin_caches()


def pages_of(request: TraceRequest) -> tuple[Page, ...]:
    """What the request publishes, at a page size of one block: whole blocks of its prompt, then pages of its own."""
    settled = request.input_length + request.output_length - 1
    whole_blocks = request.input_length // BLOCK_TOKENS
    own = range(whole_blocks, settled // BLOCK_TOKENS)
    return (*((block,) for block in request.block_ids[:whole_blocks]), *((-1, request.index, place) for place in own))


def simulated_hit_rate(requests: list[TraceRequest], num_pages: int) -> float:
    model = ListModel(BLOCK_TOKENS)
    free, hits, next_page = num_pages, 0, 0
    for request in requests:
        path = pages_of(request)
        prompt = path[: (request.input_length - 1) // BLOCK_TOKENS]
        matched = len(model.match(DEFAULT_NAMESPACE, prompt))
        hits += matched * BLOCK_TOKENS
        lock = model.lock(DEFAULT_NAMESPACE, path[:matched])
        asked = -(-(request.input_length + request.output_length - 1) // BLOCK_TOKENS) - matched
        free += len(model.evict(asked - free))
        adopted = len(path) - model.probe(DEFAULT_NAMESPACE, path)
        model.insert(DEFAULT_NAMESPACE, path, list(range(next_page, next_page + len(path))))
        next_page += len(path)
        free -= adopted
        model.unlock(lock)
    return hits / sum(request.input_length for request in requests)


@pytest.mark.parametrize("pool_fraction", [0.15, 0.3, 1.1])
def test_hit_rate_equals_a_plain_simulation(pool_fraction: float) -> None:
    # given
    requests = read_mooncake_trace(SAMPLE, 60)
    num_pages = int(working_set_tokens(requests) * pool_fraction / BLOCK_TOKENS)

    # when
    result = bench.run_tree_bench(SAMPLE, 60, BLOCK_TOKENS, pool_fraction, "radix_cache")

    # then
    expected = simulated_hit_rate(requests, num_pages)
    assert result["token_hit_rate"] == pytest.approx(expected, rel=1e-12)
    assert expected > 0.02


@pytest.mark.parametrize("cache_type", default_registry.names())
def test_every_registered_type_can_be_replayed(cache_type: str) -> None:
    # when
    result = bench.run_tree_bench(SAMPLE, 20, 16, 0.5, cache_type)

    # then
    assert (result["cache_type"], result["num_requests"]) == (cache_type, 20)
    assert {"match", "insert", "allocate", "finish"} <= result["operations"].keys()
    assert all(timing["p99_us"] >= timing["p50_us"] > 0 for timing in result["operations"].values())
    assert result["requests_per_cpu_second"] > 0
    assert cache_type in bench.format_tree_bench(result)


@pytest.mark.parametrize("names", ["full,swa", "full, recurrent", "full,swa,recurrent"])
def test_models_with_other_components_can_be_replayed(names: str) -> None:
    # when
    new_replay = replay_of(components_named(names))
    result = bench.run_tree_bench(SAMPLE, 20, 16, 0.9, "unified_radix_cache", new_replay)

    # then: it went through the cache, and no more could be used than with full pages alone
    plain = bench.run_tree_bench(SAMPLE, 20, 16, 0.9, "radix_cache")
    assert {"match", "insert", "relock", "unlock"} <= result["operations"].keys()
    assert result["operations"]["insert"]["calls"] >= 20
    assert 0 <= result["token_hit_rate"] <= plain["token_hit_rate"]
    assert result["num_nodes"] > 0


def test_components_are_named_as_the_model_has_them_and_as_the_cache_covers_them() -> None:
    with pytest.raises(ConfigError, match=r"--components='full,window' is not allowed: full, swa, recurrent"):
        components_named("full,window")
    with pytest.raises(ConfigError, match=r"--components='full,swa' is not allowed: radix_cache holds full$"):
        bench.run_tree_bench(SAMPLE, 4, 16, 0.9, "radix_cache", replay_of(components_named("full,swa")))


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(UnknownCacheTypeError, match=r"typo.*radix_cache"):
        bench.run_tree_bench(SAMPLE, 4, 16, 0.9, "typo")


def test_a_request_larger_than_the_pool_is_refused_naming_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"--pool-fraction=0\.1.*longest request"):
        bench.run_tree_bench(SAMPLE, 2, 16, 0.1, "chunk_cache")


@pytest.mark.parametrize("content", ["", "no json", "[1]", '{"input_length": 3}', '{"input_length": null}'])
def test_a_file_that_is_no_trace_is_refused_naming_the_flag(tmp_path, content) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match="--trace"):
        bench.run_tree_bench(path, 2, 16, 0.5, "radix_cache")


def test_equal_blocks_have_equal_tokens_and_outputs_are_unique() -> None:
    # given
    first, second = (request.token_ids() for request in read_mooncake_trace(SAMPLE, 2))

    # then the first block is shared, the second is not, and neither are the outputs
    assert np.array_equal(first[:BLOCK_TOKENS], second[:BLOCK_TOKENS])
    assert not (first[BLOCK_TOKENS : 2 * BLOCK_TOKENS] == second[BLOCK_TOKENS : 2 * BLOCK_TOKENS]).all()
    assert (first[-400:] == second[-400:]).mean() < 0.01
    assert first.dtype == np.int32


def test_single_operations_are_measured_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a short run
    monkeypatch.setattr(bench, "_LONG", 2048)

    # when
    result = bench.run_operations_bench(page_size=16)

    # then
    assert all(us > 0 for us in result["operations_us"].values())
    assert "match 32k, one node" in bench.format_operations_bench(result)
