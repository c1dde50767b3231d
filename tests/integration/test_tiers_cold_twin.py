"""Cold twin through every tier: wherever a prefix comes from, a request's ids are its own.

The fake models answer by a hash of all that they read, so one wrong page, snapshot or position shows. Each test also
says which tier the hit came from: nothing passes because it was computed again.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.tiered_engine import MODELS, TieredSite, file_fields, tier_fields, tiered_site

RNG = np.random.default_rng(11)
STEM = RNG.integers(0, 256, 400).astype(np.int32).tolist()
OVERLAP = pytest.mark.parametrize("overlap", [True, pytest.param(False, marks=pytest.mark.slow)])
EVERY_MODEL = pytest.mark.parametrize(
    "model", [model if model in ("full", "all") else pytest.param(model, marks=pytest.mark.slow) for model in MODELS]
)
POLICIES = ("write_through", "write_through_selective", "write_back")
CROWDS_OFTEN = (("full", "write_through_selective", True), ("all", "write_back", False))
CROWDS = [
    crowd if crowd in CROWDS_OFTEN else pytest.param(*crowd, marks=pytest.mark.slow)
    for crowd in itertools.product(MODELS, POLICIES, (True, False))
]


def sizes(page_size: int) -> dict[str, Any]:
    """Fields for prompts of a few pages."""
    return {
        "page_size": page_size,
        "context_length": max(128, 8 * page_size),
        "max_total_tokens": max(192, 16 * page_size),
        "chunked_prefill_size": max(16, page_size),
    }


def prompt_of(page_size: int) -> list[int]:
    """A few whole pages, and a token."""
    return STEM[: max(40, 3 * page_size) + 1]


def heard(site: TieredSite, prompt: list[int]) -> None:
    """Asked for as often as any policy wants."""
    for _ in range(3):
        site.ask(prompt)


@OVERLAP
@pytest.mark.parametrize("policy", POLICIES)
@EVERY_MODEL
def test_cold_device_host_and_second_device_hit_agree(model: str, policy: str, overlap: bool) -> None:
    """H11: four ways to one answer, for every component; the last shows that what was restored stays right."""
    prompt = prompt_of(4)
    with tiered_site(
        model, **sizes(4), **tier_fields(hicache_write_policy=policy, disable_overlap=not overlap)
    ) as site:
        assert site.ask(prompt).output.cached_tokens == 0
        for _ in range(3):
            hits = site.ask(prompt)
            assert (hits.device, hits.host) == (40, 0)
        site.leave_device()

        hits = site.ask(prompt)
        assert (hits.device, hits.host) == (0, 40)
        hits = site.ask(prompt)
        assert (hits.device, hits.host) == (40, 0)
        hits = site.ask([*prompt, 1, 2, 3])
        assert (hits.device, hits.host) == (40, 0)


@EVERY_MODEL
@pytest.mark.parametrize(
    "page_size", [pytest.param(1, marks=pytest.mark.slow), 16, pytest.param(64, marks=pytest.mark.slow)]
)
def test_every_page_size_travels(model: str, page_size: int, tmp_path: Path) -> None:
    prompt = prompt_of(page_size)
    whole = len(prompt) - 1
    fields = {
        **sizes(page_size),
        **file_fields(tmp_path),
    }
    with tiered_site(model, **fields) as site:
        heard(site, prompt)
        site.leave_device()
        assert site.ask(prompt).host == whole
        assert site.ask([*prompt[:-1], 250, 251]).device == whole
    with tiered_site(model, **fields) as site:
        assert site.ask(prompt).storage == whole
        assert site.ask([*prompt[:-1], 250, 251]).device == whole


@pytest.mark.parametrize("policy", POLICIES)
@EVERY_MODEL
def test_storage_outlives_the_server_and_serves_a_second_one(model: str, policy: str, tmp_path: Path) -> None:
    prompt = prompt_of(4)
    fields = {
        **sizes(4),
        **file_fields(tmp_path, hicache_write_policy=policy),
    }
    with tiered_site(model, **fields) as first:
        heard(first, prompt)
        first.leave_device()
        with tiered_site(model, **fields) as second:  # at the same time
            assert second.ask(prompt).storage == 40
            assert second.ask(prompt).device == 40
            second.leave_device()
            assert second.ask(prompt).host == 40
            first.leave_host()
            assert first.ask(prompt).storage == 40
    with tiered_site(model, **fields) as again:  # after a restart
        assert again.ask(prompt).storage == 40
        assert again.ask([*prompt, 1]).device == 40


@EVERY_MODEL
def test_a_host_that_keeps_nothing_passes_pages_on(model: str, tmp_path: Path) -> None:
    """buffer_only: the host is the way to storage and back, and holds nothing afterwards."""
    prompt = prompt_of(4)
    fields = {
        **sizes(4),
        **file_fields(tmp_path, hicache_host_mode="buffer_only"),
    }
    with tiered_site(model, **fields) as site:
        heard(site, prompt)
        assert site.counters().num_host_pages_free == site.counters().num_host_pages
        site.leave_device()
        assert site.ask(prompt).storage == 40
        assert site.ask(prompt).device == 40
        assert site.counters().num_host_pages_free == site.counters().num_host_pages
    with tiered_site(model, **fields) as site:
        assert site.ask(prompt).storage == 40


@EVERY_MODEL
def test_each_tier_gives_the_part_that_it_has(model: str, tmp_path: Path) -> None:
    """The device has the beginning, the host more, storage most."""
    fields = {
        **sizes(4),
        **file_fields(tmp_path),
    }
    with tiered_site(model, **fields) as site:
        site.ask(STEM[:73])  # 72 tokens in storage
        site.leave_device()
        site.leave_host()
        site.ask([*STEM[:48], 9], max_tokens=1)  # 48 of them come back to the host
        site.leave_device()
        site.ask([*STEM[:24], 9], max_tokens=1)  # 24 come back to the device

        hits = site.ask(STEM[:73])

        assert (hits.device, hits.host, hits.storage) == (24, 24, 24)
        assert site.ask(STEM[:73]).device == 72


@EVERY_MODEL
def test_branches_and_turns_come_back_from_below(model: str, tmp_path: Path) -> None:
    """A conversation goes on after its turns left the device; another branches off within a turn."""
    fields = {
        **sizes(4),
        **file_fields(tmp_path),
    }
    history = STEM[:20]
    with tiered_site(model, **fields) as site:
        for turn in range(3):
            hits = site.ask(history, max_tokens=13)
            if turn:
                assert hits.device == 0
                assert hits.host >= len(history) - 3 - 1 - 8
            history = [*history, *hits.output.token_ids, 5, 6, 7]
            site.leave_device()
        branch = site.ask([*history[:25], 200, 201], max_tokens=6)
        assert branch.host >= 16
        site.leave_device()
        site.leave_host()
        assert site.ask(history, max_tokens=2).storage >= len(history) - 3 - 1 - 8


@pytest.mark.parametrize(("model", "policy", "overlap"), CROWDS)
def test_a_crowd_over_small_pools_gets_its_own_answers(model: str, policy: str, overlap: bool) -> None:
    """Traffic evicts on device and host, rows give way to one another, prefixes go down and come back meanwhile."""
    fields = {
        **sizes(4),
        **tier_fields(hicache_write_policy=policy, hicache_ratio=1.5, disable_overlap=not overlap),
        "swa_full_tokens_ratio": 0.6,
    }
    rng = np.random.default_rng(5)
    with tiered_site(model, **fields) as site:
        for _ in range(30):
            start = 120 * int(rng.integers(0, 3))
            end = start + int(rng.integers(30, 80))
            site.engine.add([*STEM[start:end], int(rng.integers(256))], max_tokens=int(rng.integers(1, 20)))
            site.step(int(rng.integers(1, 8)))
        site.finish()
        site.engine.check_replies()
        assert site.counters().restored_tokens > 0
        assert sum(each.restored_tokens.host for each in site.engine.outputs.values()) > 0
