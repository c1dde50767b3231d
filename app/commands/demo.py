"""`tpukv demo`: a few real prompts that share a system prompt, and what the cache made of it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from app.commands.demo_prompts import QUESTIONS, REHEARSAL_PROMPT, SYSTEM_PROMPT
from app.commands.engine import Engine, OpenEngine, Prompt, open_engine
from app.config.server_args import ServerArgs
from app.core.sampling import SamplingParams

if TYPE_CHECKING:
    from app.scheduling.request import RequestOutput

WIDTH = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoArgs:
    """Serve a few chat prompts that share a system prompt, and show which part of each came from the cache."""

    max_tokens: int = 48
    """Most tokens of an answer."""

    server: ServerArgs = field(default_factory=ServerArgs)
    """The engine. Each of these can also come from the environment, as TPUKV_PAGE_SIZE and so on."""


def run(args: DemoArgs, opening: OpenEngine = open_engine) -> int:
    sampling = SamplingParams(max_tokens=args.max_tokens)
    first, others = QUESTIONS[:1], QUESTIONS[1:]
    with opening(args.server) as engine:
        for questions in (first, others):  # once for the compiler, so that the times below are those of serving
            engine.answer(_prompts(questions, REHEARSAL_PROMPT), SamplingParams(max_tokens=2))
        print("One prompt, whose prefix is not cached yet:\n")
        _ask(engine, first, sampling)
        print(f"{len(others)} more together, with the same system prompt:\n")
        _ask(engine, others, sampling)
        print(f"Cache type {engine.cache.name}: {engine.cache.reason}")
        pages = ", ".join(f"{count} {name}" for name, count in engine.check_ledger().items())
        print(f"Ledger: every page has exactly one owner ({pages})")
    return 0


def _ask(engine: Engine, questions: tuple[str, ...], sampling: SamplingParams) -> None:
    outputs = engine.answer(_prompts(questions, SYSTEM_PROMPT), sampling)
    for question, output in zip(questions, outputs, strict=True):
        print(_shown(question, output), flush=True)


def _prompts(questions: tuple[str, ...], system: str) -> list[Prompt]:
    return [Prompt(question, system) for question in questions]


def _shown(question: str, output: RequestOutput) -> str:
    answer = textwrap.fill(output.text.strip(), WIDTH, initial_indent="    ", subsequent_indent="    ")
    waited = "no token" if output.first_token_ns is None else f"first token after {output.first_token_ns / 1e6:.0f} ms"
    return (
        f"  {question}\n{answer}\n    {output.prompt_tokens} prompt tokens, {output.cached_tokens} cached, {waited}\n"
    )
