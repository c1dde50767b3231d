"""The command line. What a user gets wrong is told in one line on stderr with exit code 2, never as a traceback.

Exit codes: 0 done; 1 it went wrong; 2 refused; 130 interrupted; 141 the reader of our output went away.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from app.commands import bench, bench_serve, bench_tiers, cache, demo, doctor, generate, serve
from app.commands.arguments import Flag, UsageError, did_you_mean, flags_of, from_environment, parse
from app.config.server_args import ServerArgs
from app.errors import AppError, BatchOrderError, IntegrityError, OwnershipError

PROG = "tpukv"
FAILED, REFUSED, INTERRUPTED, OUTPUT_CLOSED = 1, 2, 130, 141
OUR_BUGS = (OwnershipError, IntegrityError, BatchOrderError)


class Command(NamedTuple):
    """One command: the words that name it, what it takes, and what it does. `run` imports what is heavy."""

    words: tuple[str, ...]
    summary: str
    arguments: type
    run: Callable[[Any], int]
    engine_settings: Callable[[Any], ServerArgs]

    @property
    def name(self) -> str:
        return " ".join(self.words)


COMMANDS = (
    Command(("serve",), "serve the model as OpenAI's API", serve.ServeArgs, serve.run, lambda args: args.server),
    Command(("generate",), "answer prompts", generate.GenerateArgs, generate.run, lambda args: args.server),
    Command(("demo",), "serve a few prompts that share a prefix", demo.DemoArgs, demo.run, lambda args: args.server),
    Command(
        ("doctor",), "build everything and say what is what", doctor.DoctorArgs, doctor.run, lambda args: args.server
    ),
    Command(
        ("bench", "tree"),
        "measure the prefix tree on a trace",
        bench.BenchTreeArgs,
        bench.run_tree,
        lambda _: ServerArgs(),
    ),
    Command(
        ("bench", "policies"),
        "measure eviction policies on a trace",
        bench.BenchPoliciesArgs,
        bench.run_policies,
        lambda _: ServerArgs(),
    ),
    Command(
        ("bench", "engine"),
        "measure the engine's steps",
        bench.BenchEngineArgs,
        bench.run_engine,
        lambda args: args.server,
    ),
    Command(
        ("bench", "overlap"),
        "measure copies between tiers beside compute",
        bench_tiers.BenchOverlapArgs,
        bench_tiers.run_overlap,
        lambda args: args.server,
    ),
    Command(
        ("bench", "tiers"),
        "measure two and three tiers on a trace",
        bench_tiers.BenchTiersArgs,
        bench_tiers.run_tiers,
        lambda _: ServerArgs(),
    ),
    Command(
        ("bench", "serve"),
        "measure a running server under real workloads",
        bench_serve.ServeBenchArgs,
        bench_serve.run_serve,
        lambda _: ServerArgs(),
    ),
    Command(
        ("bench", "compare"),
        "compare two such measurements",
        bench_serve.CompareArgs,
        bench_serve.run_compare,
        lambda _: ServerArgs(),
    ),
    Command(("cache", "ls"), "list the values of a file storage", cache.LsArgs, cache.run_ls, lambda _: ServerArgs()),
    Command(("cache", "du"), "tell how much each model has there", cache.DuArgs, cache.run_du, lambda _: ServerArgs()),
    Command(
        ("cache", "verify"),
        "read every value and name the bad ones",
        cache.VerifyArgs,
        cache.run_verify,
        lambda _: ServerArgs(),
    ),
    Command(("cache", "clear"), "remove values", cache.ClearArgs, cache.run_clear, lambda _: ServerArgs()),
)


def main(argv: Sequence[str] | None = None, commands: Sequence[Command] = COMMANDS) -> int:
    """Run one of `commands` and return its exit code."""
    tokens = sys.argv[1:] if argv is None else list(argv)
    try:
        code = _dispatch(commands, tokens, os.environ)
        sys.stdout.flush()  # here, where a closed pipe can still be handled
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # Python flushes stdout once more on its way out; let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    return code


def _dispatch(commands: Sequence[Command], tokens: Sequence[str], environ: Mapping[str, str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may have what the terminal's encoding has not
    for command in commands:
        if tuple(tokens[: len(command.words)]) == command.words:
            return _run(command, tokens[len(command.words) :], environ)
    return _without_command(commands, tokens)


def _without_command(commands: Sequence[Command], tokens: Sequence[str]) -> int:
    """Show the commands if that was asked for, or say which word is none."""
    group = tuple(tokens[:1]) if tokens and any(tokens[0] == command.words[0] for command in commands) else ()
    commands = [command for command in commands if command.words[: len(group)] == group]
    called = " ".join((PROG, *group))
    token = tokens[len(group)] if len(tokens) > len(group) else None
    if token in ("-h", "--help"):
        print(_overview(called, commands))
        return 0
    choices = list(dict.fromkeys(command.words[len(group)] for command in commands))
    expected = f"one of {', '.join(choices)}"
    if token is None:
        return _refuse(f"{called} needs a command: {expected}")
    if token.startswith("-"):
        return _refuse(f"{token!r} stands before the command: options come after {expected}")
    return _refuse(f"{called} has no command {token!r}{did_you_mean(token, choices)}: {expected}")


def _run(command: Command, tokens: Sequence[str], environ: Mapping[str, str]) -> int:
    flags = flags_of(command.arguments)
    debugging = False
    try:
        args: Any = parse(command.arguments, f"{PROG} {command.name}", tokens, environ)
        if args is None:
            return 0
        settings = command.engine_settings(args)
        debugging = settings.log_level == "debug"
        _configure_logging(settings)
        return command.run(args)
    except UsageError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        raise
    except AppError as error:
        if not isinstance(error, OUR_BUGS):
            return _refuse(_with_variables(_in_flags(error, flags), from_environment(flags, tokens, environ)))
        return _failed(error, debugging)
    except Exception as error:
        return _failed(error, debugging)


def _configure_logging(settings: ServerArgs) -> None:
    from app.observability.logging import configure_logging  # structlog takes a while to import

    configure_logging(settings.log_level, settings.log_format)


def _in_flags(error: AppError, flags: Sequence[Flag]) -> str:
    """The error's text, with the flag where the error names the field that the flag sets."""
    names = {flag.field: flag.name for flag in flags}
    field = error.fields.get("field")
    return str(type(error)(**{**error.fields, "field": names[field]})) if field in names else str(error)


def _with_variables(text: str, variables: Mapping[Flag, str]) -> str:
    """Add the environment variables that set what `text` is about: the command line does not show these flags."""
    used = [variable for flag, variable in variables.items() if f"{flag.name}=" in text]
    return f"{text} (set by {' and '.join(used)})" if used else text


def _overview(called: str, commands: Sequence[Command]) -> str:
    lines = [f"  {command.name:14} {command.summary}" for command in commands]
    return "\n".join(
        [
            f"usage: {called} COMMAND [OPTIONS]",
            "",
            "A KV-cache runtime for LLM serving on JAX and TPU.",
            "",
            "commands:",
            *lines,
            "",
            f"`{PROG} COMMAND --help` shows the options of a command.",
        ]
    )


def _failed(error: Exception, debugging: bool) -> int:
    """A bug of ours, or of what we use."""
    if debugging:
        traceback.print_exception(error)
    hint = "" if debugging else "; --log-level debug shows where"
    return _say(f"internal error: {type(error).__name__}: {error}{hint}", FAILED)


def _refuse(text: str) -> int:
    return _say(f"error: {text}", REFUSED)


def _say(text: str, code: int) -> int:
    """One line on stderr, whatever is in the text."""
    print(f"{PROG}: {' '.join(text.split())}", file=sys.stderr)
    return code
