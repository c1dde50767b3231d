"""One run from beginning to end: look at the server, make the workload, warm up, measure, work out the ideal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from app.bench.serve.agent import agent_conversations, fit_to_context
from app.bench.serve.arrivals import arrival_times
from app.bench.serve.conversation import Workload
from app.bench.serve.data_files import data_path
from app.bench.serve.driver import Sent
from app.bench.serve.failures import BenchServerError
from app.bench.serve.ideal import SentTokens, ideal_cached_tokens, settled_tokens
from app.bench.serve.measuring import Measured, Measuring
from app.bench.serve.mooncake import mooncake_workload
from app.bench.serve.mtbench import mtbench_workload
from app.bench.serve.result import VERSION, RequestRow, RunResult, ServerRecord
from app.bench.serve.server_api import CountedMessages, ServerApi, ServerFacts, open_http
from app.bench.serve.settings import TRACE_RATE, LoadSettings, Target, WorkloadSettings
from app.bench.serve.summary import summarise

Say = Callable[[str], None]

_NOTABLE_LAG_S = 0.05


class ServeBench:
    """`say` is told what is being done, a line at a time."""

    def __init__(self, *, target: Target, workload: WorkloadSettings, load: LoadSettings, say: Say) -> None:
        self._target = target
        self._settings = workload
        self._load = load
        self._say = say

    async def run(self) -> RunResult:
        """Measure. A run that is interrupted (cancelled), or whose server goes away, while requests are measured
        returns what there is and says so in `ending`; before that, it raises.

        Raises ConfigError for settings that this server or this data cannot have, BenchServerError for a server that
        cannot be measured.
        """
        data = data_path(self._settings)
        async with open_http(self._target) as http:
            api = ServerApi(http, self._target)
            server = await api.describe()
            counted = CountedMessages(api, server.model)
            workload = await self._workload(data, server, counted)
            arrivals = arrival_times(workload, self._load, self._settings.seed)
            measuring = Measuring(
                http=http,
                api=api,
                target=self._target,
                model=server.model,
                concurrency=self._load.concurrency,
            )
            notes = [*workload.notes, *await self._warm_up(measuring, workload, arrivals)]
            started_at = datetime.now(UTC).isoformat(timespec="seconds")
            self._say(f"measuring {workload.num_requests} requests")
            measured = await measuring.measure(workload, arrivals)
            ideal, why_not = await self._ideal(measured, server, counted)
        if measured.loop_lag_s > _NOTABLE_LAG_S:
            notes.append(f"this client was up to {1e3 * measured.loop_lag_s:.0f} ms late itself; times are no better")
        if why_not is not None:
            notes.append(f"the ideal hit rate is not known: {why_not}")
        rows = [_row(place, one, measured.began, ideal) for place, one in enumerate(measured.sent)]
        return RunResult(
            version=VERSION,
            started_at=started_at,
            ending=measured.ending,
            settings=self._recorded(data),
            digest=workload.digest(),
            server=ServerRecord(
                url=self._target.url,
                model=server.model,
                cache_type=server.cache_type,
                page_size=server.page_size,
                context_length=server.context_length,
                info=server.info,
            ),
            notes=notes,
            loop_lag_s=measured.loop_lag_s,
            summary=summarise(rows, workload.num_requests),
            rows=rows,
        )

    async def _workload(self, data: Path, server: ServerFacts, counted: CountedMessages) -> Workload:
        wanted = self._settings
        if wanted.workload == "mooncake":
            return mooncake_workload(
                data,
                num_requests=wanted.conversations,
                length_scale=wanted.kept_length,
                max_prompt_tokens=wanted.max_prompt_tokens,
                context_length=server.context_length,
                vocab_size=wanted.token_id_limit,
            )
        if wanted.workload == "mtbench":
            return mtbench_workload(data, max_tokens=wanted.reply_tokens, seed=wanted.seed, count=wanted.conversations)
        conversations = agent_conversations(
            data, max_tokens=wanted.reply_tokens, seed=wanted.seed, count=wanted.conversations
        )
        self._say(f"counting the tokens of {sum(len(one.turns) for one in conversations)} prompts")
        return await fit_to_context(conversations, counted, server.context_length)

    async def _warm_up(self, measuring: Measuring, workload: Workload, arrivals: Sequence[float | None]) -> list[str]:
        """-> notes."""
        if self._load.skip_warmup:
            return ["not warmed up, and the cache was not emptied before: it may have had prompts already"]
        self._say(f"warming up with the same {workload.num_requests} requests")
        sent = await measuring.warm_up(workload, arrivals)
        failed = [one.exchange.failure for one in sent if one.exchange.failure is not None]
        if not failed:
            return []
        return [f"{len(failed)} requests of the warm-up failed, the first with {failed[0].label}: {failed[0].message}"]

    async def _ideal(
        self, measured: Measured, server: ServerFacts, counted: CountedMessages
    ) -> tuple[list[int] | None, str | None]:
        """-> tokens for each request sent, or why they are not known."""
        if server.page_size is None:
            return None, "the server does not say its page size"
        if measured.ending != "complete":
            return None, "the run was not completed"
        self._say("working out the ideal hit rate")
        try:
            prompts = [await _prompt_tokens(one, counted) for one in measured.sent]
        except BenchServerError as error:
            return None, str(error)
        except asyncio.CancelledError:  # what was measured is worth more than the end of this
            return None, "interrupted"
        return ideal_cached_tokens(_settled(measured.sent, prompts), server.page_size), None

    def _recorded(self, data: Path) -> dict[str, Any]:
        """All that makes runs comparable, with the defaults filled in."""
        wanted, load = self._settings, self._load
        shared = {
            "workload": wanted.workload,
            "data": data.name,
            "conversations": wanted.conversations,
            "seed": wanted.seed,
            "concurrency": load.concurrency,
            "rate": load.rate,
            "skip_warmup": load.skip_warmup,
        }
        if wanted.workload != "mooncake":
            return {**shared, "max_tokens": wanted.reply_tokens}
        return {
            **shared,
            "length_scale": wanted.kept_length,
            "max_prompt_tokens": wanted.max_prompt_tokens,
            "vocab_size": wanted.token_id_limit,
            "time_scale": load.kept_time if load.rate == TRACE_RATE else None,
        }


async def _prompt_tokens(one: Sent, counted: CountedMessages) -> np.ndarray:
    if not one.turn.messages:
        return one.turn.token_ids
    return np.array(await counted.token_ids(one.turn.sent_messages(one.last_reply)), np.int32)


def _settled(sent: Sequence[Sent], prompts: Sequence[np.ndarray]) -> list[SentTokens]:
    """A reply is known where the next turn holds it. A recorded conversation goes on with other replies than these."""
    next_prompts = {
        (one.conversation.name, one.place - 1): prompt
        for one, prompt in zip(sent, prompts, strict=True)
        if one.turn.holds_last_reply
    }
    settled = [
        settled_tokens(prompt, next_prompts.get((one.conversation.name, one.place)), one.exchange.completion_tokens)
        for one, prompt in zip(sent, prompts, strict=True)
    ]
    return [SentTokens(prompt=prompt, settled=tokens) for prompt, tokens in zip(prompts, settled, strict=True)]


def _row(place: int, one: Sent, began: float, ideal: Sequence[int] | None) -> RequestRow:
    exchange = one.exchange

    def after(moment: float) -> float:
        return round(moment - began, 6)

    return RequestRow(
        request=place,
        conversation=one.conversation.name,
        turn=one.place,
        due_s=after(one.due),
        sent_s=after(exchange.sent),
        first_byte_s=None if exchange.first_byte is None else after(exchange.first_byte),
        delta_s=[after(moment) for moment in exchange.deltas],
        end_s=after(exchange.end),
        prompt_tokens=exchange.prompt_tokens,
        completion_tokens=exchange.completion_tokens,
        cached_tokens=exchange.cached_tokens,
        ideal_cached_tokens=None if ideal is None else ideal[place],
        finish_reason=exchange.finish_reason,
        failure=None if exchange.failure is None else exchange.failure.label,
        failure_message=None if exchange.failure is None else exchange.failure.message,
    )
