"""The server under a soak as its clients see it, and the books they keep on what they saw."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.soak_requests import Asked, check_answer, read_answer
from tests.support.soak_wire import Reply

# What a server may answer when it cannot serve now.
BUSY = {429: "queue_full"}
ERROR_FIELDS = {"message", "type", "param", "code"}


@dataclass(slots=True)
class Books:
    """What clients saw. The token counts are of answers that came whole; `cancelled` requests may count or not."""

    served: int = 0
    cancelled: int = 0
    left: Counter[str] = field(default_factory=Counter)  # connections that were given up, by how
    refused: Counter[str] = field(default_factory=Counter)  # by code
    ended: Counter[str] = field(default_factory=Counter)  # choices, by finish reason
    prompt_tokens: int = 0  # as often as there were choices
    output_tokens: int = 0
    least_cached: int = 0

    @property
    def num_refused(self) -> int:
        return self.refused.total()


class Site:
    """One round's view of a server: where it is, a pool of connections to it, and the books."""

    def __init__(self, url: str, http: httpx.AsyncClient, *, aborts: bool) -> None:
        """`aborts`: whether clients of this round end the requests of others."""
        self.http = http
        self.port = httpx.URL(url).port or 80
        self.books = Books()
        self._aborts = aborts

    def settle(self, asked: Asked, status: int, raw: bytes, *, may_be_aborted: bool = False) -> None:
        """The reply to a request that was good: the right answer, or that there is no room for it now."""
        if status != 200:
            self.refusal(status, raw, BUSY)
            return
        answer = read_answer(asked, raw)
        check_answer(asked, answer, may_be_aborted=may_be_aborted or self._aborts)
        books = self.books
        books.served += 1
        books.ended.update(str(choice.finish_reason) for choice in answer.choices.values())
        assert answer.usage is not None
        books.output_tokens += answer.usage["completion_tokens"]
        if all(choice.finish_reason != "abort" for choice in answer.choices.values()):  # else it may not have begun
            books.prompt_tokens += asked.num_choices * asked.prompt_tokens
            books.least_cached += asked.num_choices * answer.usage["prompt_tokens_details"]["cached_tokens"]

    def refusal(self, status: int, raw: bytes, allowed: dict[int, str]) -> None:
        """An error in OpenAI's form, with one of these codes under its status."""
        assert status in allowed, (status, raw[:300])
        error = json.loads(raw)["error"]
        assert error.keys() == ERROR_FIELDS, error
        assert error["message"], error
        assert error["code"] == allowed[status], error
        self.books.refused[error["code"] or str(status)] += 1

    def refused_reply(self, reply: Reply, allowed: dict[int, Any]) -> None:
        self.refusal(reply.status, reply.body, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The server's own books: counters of /metrics since its start."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    evicted_tokens: int
    retractions: int
    ended: Counter[str]
    refused: Counter[str]


async def figures(http: httpx.AsyncClient) -> Figures:
    return read_figures((await http.get("/metrics")).raise_for_status().text)


def read_figures(text: str) -> Figures:
    samples: dict[str, Counter[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            label = next(iter(sample.labels.values()), "")
            samples.setdefault(sample.name, Counter())[label] += int(sample.value)
    return Figures(
        prompt_tokens=samples["tpukv:prompt_tokens_total"].total(),
        cached_tokens=samples["tpukv:cached_tokens_total"].total(),
        output_tokens=samples["tpukv:generation_tokens_total"].total(),
        evicted_tokens=samples["tpukv:evicted_tokens_total"].total(),
        retractions=samples["tpukv:num_preemptions_total"].total(),
        ended=samples.get("tpukv:request_success_total", Counter()),
        refused=samples.get("tpukv:requests_refused_total", Counter()),
    )


def check_books(books: Books, before: Figures, after: Figures, *, exact: bool) -> None:
    """The server counted what its clients saw: all of it and no more where nobody cancels, at least that otherwise."""
    ended, refused = after.ended - before.ended, after.refused - before.refused
    seen = {
        "prompt tokens": books.prompt_tokens,
        "output tokens": books.output_tokens,
        **{f"ended by {reason}": count for reason, count in books.ended.items()},
        **{f"refused as {code}": count for code, count in books.refused.items()},
    }
    counted = {
        "prompt tokens": after.prompt_tokens - before.prompt_tokens,
        "output tokens": after.output_tokens - before.output_tokens,
        **{f"ended by {reason}": count for reason, count in ended.items()},
        **{f"refused as {code}": count for code, count in refused.items()},
    }
    both = {name: (seen.get(name, 0), counted.get(name, 0)) for name in seen.keys() | counted.keys()}
    wrong = {name: (saw, had) for name, (saw, had) in both.items() if saw > had or (exact and saw != had)}
    assert not wrong, f"(what clients saw, what the server counted): {wrong}"
    assert books.least_cached <= after.cached_tokens - before.cached_tokens
