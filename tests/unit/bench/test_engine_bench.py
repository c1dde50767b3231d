"""The engine benchmark measures real steps and prints them with their floor."""

from __future__ import annotations

import json

import pytest

from app.bench import control
from app.bench import engine as bench
from app.config.server_args import ServerArgs
from app.models.bundled import find_bundled_model


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "CONTROL_STEPS", 6)
    monkeypatch.setattr(control, "NO_REUSE_REQUESTS", 6)
    monkeypatch.setattr(control, "NO_REUSE_SHAPES", ((160, 4), (60, 8)))
    monkeypatch.setattr(control, "NO_REUSE_ROUNDS", 1)
    monkeypatch.setattr(control, "CONTROL_ROUNDS", 2)
    monkeypatch.setattr(control, "CONTROL_BATCHES", (1, 3))
    monkeypatch.setattr(bench, "DECODE_BATCHES", (1,))
    monkeypatch.setattr(bench, "STEPS", 3)


@pytest.mark.usefixtures("short")
def test_control_time_is_the_sum_of_its_parts():
    rows = control.control_times()
    assert [row["running"] for row in rows] == [1, 3]
    for row in rows:
        assert row["control_us"] > 0
        assert row["prepare_us"] > 0
        assert row["scheduler_us"] > 0


@pytest.mark.usefixtures("short")
def test_requests_that_share_nothing_are_served_by_each_cache():
    rows = control.no_reuse_times()
    assert [(row["prompt_tokens"], row["output_tokens"]) for row in rows] == [(160, 4), (60, 8)]
    for row in rows:
        tree, none = (row["us_a_request"][name] for name in ("unified_radix_cache", "chunk_cache"))
        assert tree > 0
        assert row["ratio"] == pytest.approx(tree / none)


def test_a_result_is_printed_with_its_floor_and_ratio():
    result = {
        "decode": [{"batch": 4, "step_ms": 30.0, "bare_ms": 20.0, "step_over_bare": 1.5}],
        "pool_size": {"small_ms": 10.0, "large_ms": 11.0, "large_over_small": 1.1},
        "prefill": {"tokens_per_second": 512.4},
        "control": [{"running": 256, "control_us": 240.0, "scheduler_us": 170.0, "tree_us": 0.0, "prepare_us": 70.0}],
        "no_reuse": [
            {
                "prompt_tokens": 600,
                "output_tokens": 32,
                "us_a_request": {"unified_radix_cache": 1100.0, "chunk_cache": 1000.0},
                "ratio": 1.1,
            }
        ],
    }
    text = bench.format_engine_bench(result)
    for part in (
        "batch   4",
        "bare     20.0 ms",
        "ratio 1.50",
        "ratio 1.10",
        "512 tokens/s",
        "256 running:   240.0 us",
        "600 + 32  tokens: unified_radix_cache 1,100 us a request",
    ):
        assert part in text


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(find_bundled_model() is None, reason="the bundled model package is not installed")
@pytest.mark.usefixtures("short")
def test_the_whole_benchmark_runs_on_the_bundled_model():
    result = bench.run_engine_bench(ServerArgs())
    assert json.loads(json.dumps(result)) == result
    assert result["decode"][0]["step_over_bare"] > 0
    assert bench.format_engine_bench(result)
