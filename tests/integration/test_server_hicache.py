"""A whole server with tiers: what it tells of them, and a storage that comes and goes while it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.asking import Asker, error_of, wait_until
from tests.support.server import RunningServer, running_server

TIERS: dict[str, Any] = {
    "cache_type": None,
    "enable_hierarchical_cache": True,
    "hicache_write_policy": "write_through",
    "hicache_ratio": 8.0,
    "warmup": "none",  # so that the first restore is taken: this model computes quicker than pages travel
}
STORAGE, CLEAR = "/hicache/storage-backend", "/clear_hicache_storage_backend"
PROMPT = "A prompt of a few pages, which go down and come back."
HIT = (len(PROMPT) - 1) // 4 * 4


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with running_server(**TIERS) as running:
        yield running


@pytest.fixture
def asker(server: RunningServer) -> Iterator[Asker]:
    with Asker(server.url) as made:
        yield made


def attach(asker: Asker, backend: str = "memory", **fields: Any) -> httpx.Response:
    return asker.http.put(STORAGE, json={"hicache_storage_backend": backend, **fields})


def storage(asker: Asker) -> dict[str, Any]:
    told: dict[str, Any] = asker.http.get(STORAGE).raise_for_status().json()
    return told


def by_tier(asker: Asker, prompt: str = PROMPT) -> dict[str, int]:
    usage = asker.whole(prompt=prompt, max_tokens=1, return_cached_tokens_details=True).usage
    assert usage is not None
    return dict(usage["prompt_tokens_details"]["cached_tokens_details"])


def metric(asker: Asker, name: str) -> float:
    return asker.metrics()[f"tpukv:{name}"]


def push_out(asker: Asker) -> None:
    """Other prompts need all pages of the device."""
    wait_until(lambda: metric(asker, "hicache_transfers_in_flight{direction=backup}") == 0)
    for number in range(8):
        asker.whole(prompt=f"{number} {'other' * 15}", max_tokens=1)
    wait_until(lambda: metric(asker, "hicache_queue_length{queue=backup}") == 0)


def test_a_host_hit_is_told_in_usage_metrics_and_state(asker: Asker) -> None:
    # given
    asker.whole(prompt=PROMPT, max_tokens=1)
    wait_until(lambda: metric(asker, "host_backup_tokens_total") >= HIT)
    push_out(asker)

    # when
    hits = by_tier(asker)

    # then
    assert hits["host"] > 0
    assert metric(asker, "cached_tokens_total{cache_source=host}") == hits["host"]
    assert metric(asker, "load_back_tokens_total") == hits["host"]
    assert metric(asker, "hicache_transfers_total{direction=restore}") >= 1
    assert metric(asker, "hicache_bytes_total{direction=restore}") > 0
    assert 0 <= metric(asker, "hicache_hidden_ratio") <= 1
    host = asker.info()["tiers"]["host"]
    assert host["restored_tokens"] == hits["host"]
    assert 0 < host["used_tokens"] == metric(asker, "hicache_host_used_tokens") <= host["total_tokens"]
    device, on_host = asker.http.get("/cache_state").json()["tiers"]
    assert on_host["name"] == "host memory"
    assert on_host["capacity"]["tokens"] == host["total_tokens"] == 8 * device["capacity"]["tokens"]
    parts = ("cached_locked", "cached_unlocked", "held_by_requests", "restoring", "free")
    assert sum(on_host[part]["pages"] for part in parts) == on_host["capacity"]["pages"]


def test_a_flush_empties_the_host_too(asker: Asker) -> None:
    asker.whole(prompt=PROMPT, max_tokens=1)
    wait_until(lambda: metric(asker, "host_backup_tokens_total") >= HIT)
    wait_until(lambda: metric(asker, "hicache_transfers_in_flight{direction=backup}") == 0)

    asker.http.post("/flush_cache").raise_for_status()

    assert metric(asker, "hicache_host_used_tokens") == 0
    assert by_tier(asker) == {"device": 0, "host": 0, "storage": 0}


def test_a_storage_that_is_attached_is_written_to_and_read_from(asker: Asker, tmp_path: Path) -> None:
    # given
    assert storage(asker)["attached"] is False
    assert metric(asker, "storage_attached") == 0

    # when
    told = attach(asker, "file", hicache_storage_path=str(tmp_path)).raise_for_status().json()

    # then
    assert (told["attached"], told["backend"], told["path"]) == (True, "file", str(tmp_path))
    assert metric(asker, "storage_attached") == 1
    asker.whole(prompt=PROMPT, max_tokens=1)
    wait_until(lambda: metric(asker, "backuped_tokens_total") >= HIT)
    assert storage(asker)["usage"]["num_values"] >= HIT // 4
    asker.http.post("/flush_cache").raise_for_status()
    assert by_tier(asker)["storage"] == HIT
    assert metric(asker, "cached_tokens_total{cache_source=storage}") == HIT
    assert metric(asker, "storage_outcomes_total{operation=get,outcome=hit}") >= HIT // 4


def test_a_second_storage_is_refused_until_the_first_is_detached(asker: Asker) -> None:
    attach(asker).raise_for_status()
    assert attach(asker).status_code == 409

    assert asker.http.delete(STORAGE).json() == {"detached": True}

    assert asker.http.delete(STORAGE).json() == {"detached": False}
    assert storage(asker)["backend"] is None
    assert by_tier(asker)["storage"] == 0
    assert attach(asker).json()["attached"] is True


def test_values_stay_when_a_storage_is_detached(asker: Asker, tmp_path: Path) -> None:
    attach(asker, "file", hicache_storage_path=str(tmp_path)).raise_for_status()
    asker.whole(prompt=PROMPT, max_tokens=1)
    wait_until(lambda: metric(asker, "backuped_tokens_total") >= HIT)
    asker.http.delete(STORAGE).raise_for_status()
    asker.http.post("/flush_cache").raise_for_status()

    attach(asker, "file", hicache_storage_path=str(tmp_path)).raise_for_status()

    assert by_tier(asker)["storage"] == HIT


def test_a_storage_that_is_cleared_is_empty_and_written_to_again(asker: Asker) -> None:
    attach(asker).raise_for_status()
    asker.whole(prompt=PROMPT, max_tokens=1)
    wait_until(lambda: metric(asker, "backuped_tokens_total") >= HIT)
    stored = storage(asker)["usage"]["num_values"]

    assert asker.http.post(CLEAR).json() == {"cleared_values": stored}

    assert storage(asker)["usage"] == {"num_bytes": 0, "num_values": 0}
    asker.http.post("/flush_cache").raise_for_status()
    assert by_tier(asker)["storage"] == 0
    wait_until(lambda: storage(asker)["usage"]["num_values"] >= HIT // 4)


def test_there_is_nothing_to_clear_without_a_storage(asker: Asker) -> None:
    reply = asker.http.post(CLEAR)
    assert (reply.status_code, error_of(reply)["code"]) == (409, "conflict")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"hicache_storage_backend": "floppy"}, "hicache_storage_backend"),
        ({"hicache_storage_backend": ""}, "hicache_storage_backend"),
        ({}, "hicache_storage_backend"),
        ({"hicache_storage_backend": "file"}, "hicache_storage_path"),
        ({"hicache_storage_backend": "file", "hicache_storage_path": "\0"}, "hicache_storage_path"),
        ({"hicache_storage_backend": "memory", "hicache_storage_size": 0}, "hicache_storage_size"),
        ({"hicache_storage_backend": "memory", "hicache_storage_options": {"a": "b"}}, "hicache_storage_options"),
        ({"hicache_storage_backend": "memory", "hicache_storage_options": {"a": 1}}, "hicache_storage_options"),
    ],
    ids=str,
)
def test_a_storage_that_cannot_be_had_is_named_and_nothing_changes(
    asker: Asker, fields: dict[str, Any], param: str
) -> None:
    reply = asker.http.put(STORAGE, json=fields)

    assert reply.status_code == 400
    assert str(error_of(reply)["param"]).startswith(param)
    assert storage(asker)["attached"] is False


def test_the_storage_of_the_start_can_be_changed() -> None:
    with running_server(**TIERS, hicache_storage_backend="memory") as server, Asker(server.url) as asker:
        assert storage(asker)["backend"] == "memory"
        assert asker.http.delete(STORAGE).json() == {"detached": True}
        assert storage(asker)["attached"] is False


@pytest.mark.parametrize(("method", "path"), [("GET", STORAGE), ("PUT", STORAGE), ("DELETE", STORAGE), ("POST", CLEAR)])
def test_without_tiers_every_route_says_how_to_get_them(method: str, path: str) -> None:
    with running_server() as server, Asker(server.url) as asker:
        reply = asker.http.request(method, path, json={"hicache_storage_backend": "memory"})
        assert (reply.status_code, error_of(reply)["code"]) == (409, "conflict")
        assert "--enable-hierarchical-cache" in error_of(reply)["message"]
        assert "tiers" not in asker.info()
