"""The replay with tiers finds what a cache of that many pages can, and nothing of what is below when nothing moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.bench.instant_runtime import InstantStorage
from app.bench.tiers import POLICIES, TierReplay, TierSizes, format_tiers_bench, run_tiers_bench
from app.errors import ConfigError

SAMPLE = Path(__file__).parents[2] / "data" / "mooncake_sample.jsonl"
PAGE = 4


def prompts(count: int) -> list[np.ndarray]:
    """Nothing in common; 8 whole pages and the token that is computed."""
    return [np.arange(8 * PAGE + 1, dtype=np.int32) + 1000 * number for number in range(count)]


def replayed(sizes: TierSizes, rounds: int = 2) -> TierReplay:
    replay = TierReplay(sizes, PAGE, "write_back")
    for _ in range(rounds):
        for prompt in prompts(4):
            replay.serve(prompt, prompt)
            replay.check_integrity()
    return replay


def test_what_left_the_device_is_found_on_the_host() -> None:
    replay = replayed(TierSizes(device=20, host=64))

    assert replay.hit_tokens == 4 * 8 * PAGE
    assert replay.runtime.num_moved["restores"] > 0


def test_what_no_tier_has_room_for_is_a_miss() -> None:
    replay = replayed(TierSizes(device=9, host=1))

    assert replay.hit_tokens < 4 * 8 * PAGE


def test_what_left_the_host_is_found_in_storage() -> None:
    replay = replayed(TierSizes(device=20, host=20, storage=64))

    assert replay.hit_tokens == 4 * 8 * PAGE
    assert replay.runtime.num_moved["fetches"] > 0


def test_storage_keeps_what_was_used_last() -> None:
    storage = InstantStorage(2)
    storage.store([b"a", b"b"])
    assert storage.has([b"a"]).all()
    storage.store([b"c"])

    assert storage.has([b"a", b"b", b"c"]).tolist() == [True, False, True]


def test_every_policy_is_replayed_beside_one_tier() -> None:
    result = run_tiers_bench(SAMPLE, device=0.4, host=0.4, num_requests=30)

    assert [row["policy"] for row in result["policies"]] == list(POLICIES)
    for row in result["policies"]:
        assert result["device_only"] <= row["token_hit_rate"] <= 1
        assert row["over_one_tier"] == pytest.approx(row["token_hit_rate"] / result["one_tier"])
    text = format_tiers_bench(result)
    assert all(policy in text for policy in POLICIES)


@pytest.mark.parametrize("small", ["device", "host"])
def test_a_tier_smaller_than_a_request_is_refused_naming_the_flag(small: str) -> None:
    sizes = {"device": 0.5, "host": 0.5, small: 0.001}

    with pytest.raises(ConfigError, match=rf"--{small}=0\.001.*longest request"):
        run_tiers_bench(SAMPLE, num_requests=10, **sizes)
