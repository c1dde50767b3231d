"""`tpukv generate`: answer prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from app.commands.engine import OpenEngine, Prompt, open_engine
from app.commands.prompts import check_text, read_prompts
from app.config.cache_type import CacheTypeChoice
from app.config.server_args import ServerArgs
from app.core.sampling import SamplingParams
from app.errors import CacheTypeConflictError

if TYPE_CHECKING:
    from app.scheduling.request import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArgs:
    """Answer prompts. Each is one user turn of the model's chat template; all are served together."""

    prompt: tuple[str, ...] = ()
    """A prompt."""

    prompt_file: Path | None = None
    """File of prompts, one a line; a .jsonl file has a {"prompt": ...} on each line. Neither: standard input."""

    system: str | None = None
    """System message of every prompt; by default the template's own, if it has one."""

    raw: bool = False
    """Take prompts as they are, without the chat template."""

    json: bool = False
    """Print one JSON object instead of text."""

    max_tokens: int = 128
    """Most tokens of an answer."""

    min_tokens: int = 0
    """Fewest tokens of an answer: nothing stops it before."""

    ignore_eos: bool = False
    """Go on after the model's end token."""

    temperature: float = 0.0
    """0 always takes the likeliest token; higher values spread the choice."""

    top_p: float = 1.0
    """Choose among the likeliest tokens that together have this probability."""

    top_k: int = -1
    """Choose among this many of the likeliest tokens; -1 is all."""

    min_p: float = 0.0
    """Choose among tokens at least this likely, relative to the likeliest."""

    seed: int | None = None
    """Makes the choices repeatable; by default it follows from --random-seed."""

    frequency_penalty: float = 0.0
    """Lowers a token for each time it was answered."""

    presence_penalty: float = 0.0
    """Lowers a token once it was answered."""

    repetition_penalty: float = 1.0
    """Divides the score of tokens in prompt or answer."""

    stop: tuple[str, ...] = ()
    """Text that ends an answer; it is not part of it."""

    stop_token_ids: tuple[int, ...] = ()
    """Token id that ends an answer."""

    server: ServerArgs = field(default_factory=ServerArgs)
    """The engine. Each of these can also come from the environment, as TPUKV_PAGE_SIZE and so on."""

    def sampling(self) -> SamplingParams:
        """Raises RequestError naming the field, as SamplingParams does."""
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
        )


def run(args: GenerateArgs, opening: OpenEngine = open_engine, stdin: BinaryIO | None = None) -> int:
    """Everything that can be refused without a model is refused before one is opened."""
    sampling = args.sampling()
    prompts = _prompts(args, sys.stdin.buffer if stdin is None else stdin)
    with opening(args.server) as engine:
        outputs = engine.answer(prompts, sampling)
        cache, has_tiers = engine.cache, engine.has_tiers
    print((_as_json if args.json else _as_text)(prompts, outputs, cache, has_tiers))
    return _report_failures(outputs)


def _prompts(args: GenerateArgs, stdin: BinaryIO) -> list[Prompt]:
    if args.raw and args.system is not None:
        raise CacheTypeConflictError(
            field="--system",
            value=args.system,
            other_field="--raw",
            other_value=True,
            allowed="a raw prompt goes through no chat template",
        )
    if args.system:
        check_text("--system", args.system, args.system)
    if not args.prompt and args.prompt_file is None and stdin.isatty():
        print("one prompt a line; Ctrl-D ends", file=sys.stderr)
    texts = read_prompts(args.prompt, args.prompt_file, stdin)
    return [Prompt(text, args.system, args.raw) for text in texts]


def _as_json(
    prompts: Sequence[Prompt], outputs: Sequence[RequestOutput], cache: CacheTypeChoice, has_tiers: bool
) -> str:
    document = {
        "outputs": [_entry(output, has_tiers) for output in outputs],
        "cache_type": cache.name,
        "cache_type_reason": cache.reason,
    }
    return json.dumps(document, ensure_ascii=False)


def _entry(output: RequestOutput, has_tiers: bool) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.cached_tokens,
        "finish_reason": output.finish_reason,
    }
    if has_tiers:
        entry["cached_tokens_details"] = output.cached_by_tier
    return entry if output.error is None else {**entry, "error": output.error}


def _as_text(
    prompts: Sequence[Prompt], outputs: Sequence[RequestOutput], cache: CacheTypeChoice, has_tiers: bool
) -> str:
    """One answer is printed by itself, so that it can be piped; several are told apart by their prompts."""
    if len(outputs) == 1:
        return outputs[0].text
    parts = [
        f"> {prompt.text}\n{output.text}\n[{output.prompt_tokens} prompt tokens, {_cached(output, has_tiers)}; "
        f"{len(output.token_ids)} answered, {output.finish_reason}]\n"
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    return "\n".join([*parts, f"cache type {cache.name}: {cache.reason}"])


def _cached(output: RequestOutput, has_tiers: bool) -> str:
    if not has_tiers:
        return f"{output.cached_tokens} cached"
    parts = ", ".join(f"{tokens} {tier}" for tier, tokens in output.cached_by_tier.items())
    return f"{output.cached_tokens} cached ({parts})"


def _report_failures(outputs: Sequence[RequestOutput]) -> int:
    """-> 1 if an answer is not whole, after one line that says why."""
    failed = [(number, output) for number, output in enumerate(outputs, 1) if output.error is not None]
    if not failed:
        return 0
    number, first = failed[0]
    others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    print(f"tpukv: error: prompt {number} ended with {first.finish_reason}: {first.error}{others}", file=sys.stderr)
    return 1
