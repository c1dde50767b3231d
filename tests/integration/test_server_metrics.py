"""What /metrics exposes is what the documentation names, and adds up to what the replies said."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.asking import CHAT, Asker
from tests.support.server import MODEL, running_server

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"
PREFIX = "tpukv:"


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    with running_server() as server, Asker(server.url) as made:
        yield made


def documented(*, with_tiers: bool) -> dict[str, str]:
    """Kind by name, from the tables in the documentation."""
    table, _, of_tiers = (
        DOCUMENT.read_text().partition("## Metrics")[2].partition("\n## ")[0].partition("\n### Of tiers")
    )
    rows = re.findall(r"^\| (`.*?) \| (\w+) \|", table + of_tiers * with_tiers, re.MULTILINE)
    return {name: kind for names, kind in rows for name in re.findall(r"`(\w+)", names)}


def exposed(asker: Asker) -> dict[str, str]:
    """Kind by name; every name begins with the prefix."""
    families = list(text_string_to_metric_families(asker.http.get("/metrics").text))
    assert all(family.name.startswith(PREFIX) for family in families)
    kinds = {}
    for family in families:
        if not family.name.endswith("_created"):
            suffix = "_total" if family.type == "counter" else ""
            kind = "info" if family.name.endswith("_info") else family.type
            kinds[family.name.removeprefix(PREFIX) + suffix] = kind
    return kinds


def test_the_documented_metrics_are_those_exposed(asker: Asker) -> None:
    assert exposed(asker) == documented(with_tiers=False)


def test_the_documented_metrics_of_tiers_are_those_exposed() -> None:
    tiers = {"cache_type": None, "enable_hierarchical_cache": True}
    with running_server(**tiers) as server, Asker(server.url) as asker:
        assert exposed(asker) == documented(with_tiers=True)


def test_the_facts_are_labels_of_one_metric(asker: Asker) -> None:
    labels = f"{{cache_type=radix_cache,model_name={MODEL},page_size=4}}"
    assert asker.metrics()[f"{PREFIX}cache_config_info{labels}"] == 1


def test_metrics_are_plain_text_of_the_format_that_prometheus_reads(asker: Asker) -> None:
    reply = asker.http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_sums_are_those_of_the_replies_after_a_mixed_run(asker: Asker) -> None:
    """Streams and whole replies, hits and misses, stops, refusals, more than run together, evictions."""
    # given
    asker.wait_until_idle()
    before = asker.metrics()

    def ask(number: int) -> tuple[int, int, int, str]:
        way = asker.streamed if number % 2 else asker.whole
        text = f"{'shared by many of them: ' * (number % 3)}{number % 7}" + "x" * number
        stop = {"logit_bias": {"97": 100}, "stop_token_ids": [97]} if number % 5 == 0 else {}
        if number % 4 == 3:
            answer = way(CHAT, messages=[{"role": "user", "content": text}], max_tokens=4 + number, **stop)
        else:
            answer = way(prompt=text, max_tokens=4 + number, **stop)
        usage = answer.usage
        assert usage is not None
        reason = str(answer.choice.finish_reason)
        return usage["prompt_tokens"], usage["completion_tokens"], answer.cached_tokens, reason

    # when
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask, range(30)))
    asker.refused(prompt="x", temperature=-1)
    asker.refused(prompt="x" * 200)
    asker.refused(prompt="x", model="other")
    asker.wait_until_idle()

    # then
    gained = {name.removeprefix(PREFIX): value - before.get(name, 0) for name, value in asker.metrics().items()}
    prompts, outputs, cached = (sum(answer[index] for answer in answers) for index in range(3))
    reasons = [answer[3] for answer in answers]
    assert cached > 0
    expected = {
        "prompt_tokens_total": prompts,
        "prefix_cache_queries_total": prompts,
        "request_prompt_tokens_sum": prompts,
        "generation_tokens_total": outputs,
        "request_generation_tokens_sum": outputs,
        "prefix_cache_hits_total": cached,
        "cached_tokens_total{cache_source=device}": cached,
        "cached_tokens_total{cache_source=host}": 0,
        "request_success_total{finished_reason=stop}": reasons.count("stop"),
        "request_success_total{finished_reason=length}": reasons.count("length"),
        "requests_refused_total{code=400}": 1,
        "requests_refused_total{code=context_length_exceeded}": 1,
        "requests_refused_total{code=model_not_found}": 1,
        "request_prompt_tokens_count": len(answers),
        "time_to_first_token_seconds_count": len(answers),
        "e2e_request_latency_seconds_count": len(answers),
        "request_queue_time_seconds_count": len(answers),
        "inter_token_latency_seconds_count": sum(answer[1] - 1 for answer in answers[1::2]),
    }
    assert {name: gained[name] for name in expected} == expected
    assert gained["evicted_tokens_total"] > 0


def test_gauges_say_how_full_the_pool_is(asker: Asker) -> None:
    asker.wait_until_idle()
    asker.http.post("/flush_cache").raise_for_status()
    asker.cached_tokens("a prompt that leaves 8 pages")  # 28 tokens, of which 7 pages are whole
    asker.wait_until_idle()

    metrics = asker.metrics()

    assert metrics[f"{PREFIX}max_total_num_tokens"] == 256
    assert metrics[f"{PREFIX}num_used_tokens"] == metrics[f"{PREFIX}num_evictable_tokens"] == 28
    assert metrics[f"{PREFIX}num_free_tokens"] == 228
    assert metrics[f"{PREFIX}kv_cache_usage_perc"] == pytest.approx(28 / 256)
    assert metrics[f"{PREFIX}num_requests_running"] == metrics[f"{PREFIX}num_requests_waiting"] == 0
    hits, queries = metrics[f"{PREFIX}prefix_cache_hits_total"], metrics[f"{PREFIX}prefix_cache_queries_total"]
    assert metrics[f"{PREFIX}cache_hit_rate"] == pytest.approx(hits / queries)
