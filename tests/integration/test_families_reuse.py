"""Real families, way by way: wherever a prefix was computed, ids and distributions are those of the cold twin.

Windows and pages of every proportion, hits, branches, turns, eviction, retraction and aborts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.core.sampling import MAX_LOGPROBS
from app.scheduling.request import Request, RequestOutput
from tests.support.served_families import ColdTwin, FamilySite, cold_twin, served_family

REAL = ("llama", "gemma3_text", "qwen3_next")  # full attention; windows; recurrent states
TOKENS = np.random.default_rng(4).integers(0, MAX_LOGPROBS, 2000).tolist()
ANSWER = 21
MAX_STEPS = 400
FEW_PAGES = {"max_total_tokens": 160, "chunked_prefill_size": 12, "max_running_requests": 3}
OFTEN = (("gemma3_text", 16),)
SIZES = [
    (family, size) if (family, size) in OFTEN else pytest.param(family, size, marks=pytest.mark.slow)
    for family in REAL
    for size in (1, 16, 64)
]
# Window, page, chunk. Smaller than, equal to and larger than each of the others.
WINDOWS = [(8, 16, 12), (16, 16, 16), (12, 16, 12), (24, 16, 12), (40, 16, 16), (8, 1, 12), (20, 1, 12), (12, 1, 12)]
WINDOWS += [(16, 64, 32), (32, 64, 32), (48, 64, 32), (64, 64, 64), (100, 64, 32)]


def sizes(page_size: int, chunk: int = 12) -> dict[str, Any]:
    """A pool that three requests outgrow."""
    return {
        "page_size": page_size,
        "context_length": max(160, 4 * page_size),
        "max_total_tokens": max(192, 6 * page_size),
        "swa_full_tokens_ratio": 1.0,  # or window pages would be gone before a turn ends
        "chunked_prefill_size": chunk,
        "max_running_requests": 3,
    }


def cold_sizes(page_size: int) -> dict[str, Any]:
    return {"page_size": page_size, "context_length": max(160, 4 * page_size), "max_total_tokens": 8 * 160}


def step_of(family: str, page_size: int) -> int:
    """Tokens between two points from which a request can go on."""
    return -(-8 // page_size) * page_size if family == "qwen3_next" else page_size


def one_conversation(site: FamilySite, cold: ColdTwin, page_size: int, step: int) -> None:
    """Cold, hit, second hit, a branch, the next turn; evicted, computed again, hit again."""

    def answered(prompt: list[int], cached: int) -> list[int]:
        output = site.ask(prompt, ANSWER)
        assert output.cached_tokens == cached
        cold.check(prompt, output)
        return output.token_ids

    prompt = TOKENS[: max(40, 2 * page_size + 5)]
    whole = (len(prompt) - 1) // step * step
    answer = answered(prompt, 0)
    answered(prompt, whole)
    answered(prompt, whole)
    fork = len(prompt) - 7
    answered([*prompt[:fork], *TOKENS[500:520]], fork // step * step)
    turn = [*prompt, *answer, *TOKENS[600:609]]
    answered(turn, (len(prompt) + len(answer) - 1) // step * step)

    site.evict()
    answered(prompt, 0)
    answered(prompt, whole)
    answered(turn, (len(prompt) + len(answer) - 1) // step * step)
    site.evict()


def crowded_turns(site: FamilySite, cold: ColdTwin, page_size: int) -> tuple[int, int]:
    """Three conversations at once in a pool that is too small: rows give way to one another, and go on from what is
    left of their turns. -> how often one did, and tokens that were cached.
    """
    histories = [TOKENS[start : start + 30] for start in (700, 900, 1100)]
    most = max(40, 2 * page_size + 2)  # a row that is admitted is left room to grow by a page
    retractions, cached = site.scheduler.num_retractions, 0
    for turn in range(3):
        outputs = site.together(histories, max_tokens=40 if turn else most)
        for history, output in zip(histories, outputs, strict=True):
            cold.check(history, output)
            cached += output.cached_tokens
        histories = [[*history, *output.token_ids, 3, turn] for history, output in zip(histories, outputs, strict=True)]
    return site.scheduler.num_retractions - retractions, cached


@pytest.mark.parametrize(("family", "page_size"), SIZES)
def test_every_way_of_reuse_gives_what_is_computed_cold(family: str, page_size: int) -> None:
    with cold_twin(family, **cold_sizes(page_size)) as cold, served_family(family, **sizes(page_size)) as site:
        one_conversation(site, cold, page_size, step_of(family, page_size))
        retractions, cached = crowded_turns(site, cold, page_size)
        # Of six pages of 64 tokens, rows that wait for one another's keep no turn, and need not give way.
        assert page_size == 64 or (retractions > 0 and cached > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "page_size", "chunk"), WINDOWS)
def test_so_it_does_with_every_proportion_of_window_page_and_chunk(window: int, page_size: int, chunk: int) -> None:
    config = {"sliding_window": window}
    with (
        cold_twin("gemma3_text", config, **cold_sizes(page_size)) as cold,
        served_family("gemma3_text", config, **sizes(page_size, chunk)) as site,
    ):
        one_conversation(site, cold, page_size, page_size)
        crowded_turns(site, cold, page_size)


@pytest.mark.slow  # with the fake models test_engine_hybrid.py and test_engine_aborts.py always do so
@pytest.mark.parametrize("family", REAL)
def test_an_abort_at_every_step_disturbs_nobody(family: str) -> None:
    """Waiting, between chunks, decoding, retracted: one of three requests goes, the others get their own answers."""
    statuses = set()
    with cold_twin(family, **cold_sizes(4)) as cold, served_family(family, **FEW_PAGES) as site:
        for steps in range(MAX_STEPS):
            requests = [site.request(TOKENS[start : start + 30], 36) for start in (0, 100, 200)]
            for request in requests:
                site.scheduler.add(request)
            outputs = stepped(site, steps)
            alive = status_of(site, requests)
            if not alive:
                break
            victim, status = victim_of(alive, steps)
            statuses.add(status)

            site.scheduler.abort(victim)
            site.check()
            outputs |= stepped(site, MAX_STEPS)
            site.check()

            assert not site.scheduler.has_work()
            for request in requests:
                output = outputs[request.request_id]
                if output.finish_reason == "abort":
                    assert request.request_id == victim
                else:
                    cold.check(request.prompt_token_ids.tolist(), output)
            site.evict()
        else:
            pytest.fail("the requests never ended")
    assert {("waiting", False), ("prefill", False), ("decode", True), ("waiting", True)} <= statuses


def stepped(site: FamilySite, most: int) -> dict[str, RequestOutput]:
    """At most so many steps, while there is work."""
    outputs = {}
    for _ in range(most):
        if not site.scheduler.has_work():
            break
        outputs |= {output.request_id: output for output in site.scheduler.step()}
    return outputs


def status_of(site: FamilySite, requests: list[Request]) -> dict[str, tuple[str, bool]]:
    """Of those that have not ended, by id: where they are, and whether they have output."""
    found = site.scheduler._sequences
    alive = [found[request.request_id] for request in requests if request.request_id in found]
    return {each.request.request_id: (each.status.value, bool(each.output)) for each in alive}


def victim_of(alive: dict[str, tuple[str, bool]], steps: int) -> tuple[str, tuple[str, bool]]:
    """One that was retracted if there is any, else whose turn it is."""
    retracted = [each for each in alive.items() if each[1] == ("waiting", True)]
    return retracted[0] if retracted else list(alive.items())[steps % len(alive)]
