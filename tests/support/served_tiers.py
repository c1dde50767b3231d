"""A golden model behind device, host and storage tiers: one prompt, answered with its prefix from each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from app.core.sampling import MAX_LOGPROBS, SamplingParams
from app.providers.testing import overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from tests.support.served_families import arguments, files_of
from tests.support.tiered_engine import AlwaysWorth, file_fields

PROMPT = np.random.default_rng(21).integers(0, MAX_LOGPROBS, 57).astype(np.int32)
WAYS = ("cold", "device", "host", "device again", "storage after a restart", "storage of a second server")

Answer = dict[str, Any]
"""cached: tokens by tier. ids: of the answer. logprobs: of each of its tokens, by token id, the whole vocabulary."""


def served_ways(family: str, folder: Path, tp_size: int = 1) -> dict[str, Answer]:
    """The same request, cold and with its prefix from every tier."""
    given = file_fields(folder, tp_size=tp_size, max_running_requests=2, chunked_prefill_size=12, hicache_ratio=2.0)
    args = arguments(**given)
    answers = {}
    with overridden(
        arguments(cache_type="chunk_cache", tp_size=tp_size, max_running_requests=1), **files_of(family)
    ) as cold:
        answers["cold"] = _answer(cold, "cold")
    with overridden(args, **files_of(family)) as first, overridden(args, **files_of(family)) as second:
        _answer(first, "it is stored")
        answers["device"] = _answer(first, "device")
        _leave_device(first)
        answers["host"] = _answer(first, "host")
        answers["device again"] = _answer(first, "device again")
        answers["storage of a second server"] = _answer(second, "second")
    with overridden(args, **files_of(family)) as again:
        answers["storage after a restart"] = _answer(again, "restarted")
    return answers


def _answer(container: Any, name: str) -> Answer:
    scheduler = container.scheduler()
    if container.server_args().enable_hierarchical_cache:
        container.tree_cache().tiers._restores.choice = AlwaysWorth()
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, logprobs=MAX_LOGPROBS)
    (output,) = generate_all(scheduler, [Request(request_id=name, prompt_token_ids=PROMPT, sampling=sampling)])
    scheduler.check_integrity()
    container.runtime().check_integrity()
    assert output.top_logprobs is not None
    return {
        "cached": output.cached_by_tier,
        "ids": output.token_ids,
        "logprobs": [[value for _, value in sorted(pairs)] for pairs in output.top_logprobs],
    }


def _leave_device(container: Any) -> None:
    adapter, scheduler = container.scheduler_adapter(), container.scheduler()
    adapter.make_room(adapter.reachable())
    while scheduler.has_background_work():
        scheduler.step()
    scheduler.check_integrity()


def check_ways(answers: dict[str, Answer]) -> None:
    """Each came from where it should have, and all are the cold one: the same ids, KL < 1e-6."""
    assert answers.keys() == set(WAYS)
    whole = answers["device"]["cached"]["device"]
    assert whole >= 48
    for way, answer in answers.items():
        tier = way.split()[0]
        expected = {"device": 0, "host": 0, "storage": 0} | ({} if way == "cold" else {tier: whole})
        assert answer["cached"] == expected, way
        assert answer["ids"] == answers["cold"]["ids"], way
        for cold, found in zip(answers["cold"]["logprobs"], answer["logprobs"], strict=True):
            left, right = np.array(cold), np.array(found)
            assert left.size == MAX_LOGPROBS
            assert float(np.sum(np.exp(left) * (left - right))) < 1e-6, way
