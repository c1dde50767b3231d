"""From command line and environment to a command's arguments.

tyro makes the flags, the help and the values out of a dataclass. What it refuses it shows in a box of several lines, so
that is kept back and said here in one: the first wrong argument, from left to right, with its value and what is
allowed. A refusal by the dataclass itself (ServerArgs checks its fields) is passed on as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar

from app.config.http_args import HttpArgs
from app.config.server_args import ServerArgs, flag_of
from app.errors import AppError

Arguments = TypeVar("Arguments")

_FROM_ENVIRONMENT = (ServerArgs, HttpArgs)

TRUE_WORDS = ("1", "true", "yes", "on")
FALSE_WORDS = ("0", "false", "no", "off")


class UsageError(Exception):
    """A command line that cannot be understood. The text is one line for the user."""


class Flag(NamedTuple):
    """One flag of a command, as its dataclass field says."""

    field: str
    hint: Any  # the field's type
    needed: bool
    variable: str | None  # the environment variable that sets it, too

    @property
    def name(self) -> str:
        return flag_of(self.field)

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.hint is bool

    def wrong(self, text: str) -> str | None:
        """What is allowed, if `text` is no value for it."""
        allowed, accepts = _VALUES.get(self.hint, ("", _anything))
        if typing.get_origin(self.hint) is Literal:
            choices = typing.get_args(self.hint)
            allowed, accepts = f"one of {', '.join(choices)}", choices.__contains__
        return None if accepts(text) else allowed

    def as_tokens(self, text: str) -> list[str]:
        """The command line that says what `text`, a good value of the environment variable, says."""
        if self.is_switch:
            return [self.name] if text.lower() in TRUE_WORDS else [f"--no-{self.name[2:]}"]
        return [f"{self.name}={text}"]


def parse(arguments: type[Arguments], prog: str, tokens: Sequence[str], environ: Mapping[str, str]) -> Arguments | None:
    """The arguments of one command, or None after having shown its help. Raises UsageError or ConfigError."""
    import tyro

    flags = flags_of(arguments)
    if tokens and _flag_part(tokens[0]).startswith("--tyro-"):  # tyro would act on it: they are no flags of ours
        raise UsageError(explain(flags, tokens, prog))
    preset: list[str] = []
    for flag, variable in from_environment(flags, tokens, environ).items():
        text = environ[variable]
        if (allowed := flag.wrong(text)) is not None:
            raise UsageError(f"{variable}={text!r} (environment variable) is not allowed for {flag.name}: {allowed}")
        preset += flag.as_tokens(text)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(
                arguments,
                prog=prog,
                args=[*preset, *tokens],
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.DisallowNone, tyro.conf.UseAppendAction),
            )
    except SystemExit as stop:
        if not stop.code:
            return None
        raise _refusal(stop) or UsageError(explain(flags, tokens, prog)) from None


def flags_of(arguments: type) -> list[Flag]:
    """Every flag of a command, in the order of its help. Engine and server settings have environment variables."""
    hints = typing.get_type_hints(arguments)
    flags = []
    for field in dataclasses.fields(arguments):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            flags += flags_of(typing.cast(type, hint))
            continue
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        variable = f"TPUKV_{field.name.upper()}" if arguments in _FROM_ENVIRONMENT else None
        flags.append(Flag(field.name, _without_none(hint), needed, variable))
    return flags


def from_environment(flags: Sequence[Flag], tokens: Sequence[str], environ: Mapping[str, str]) -> dict[Flag, str]:
    """The flags that the environment sets, with their variables: those not on the command line. Empty is not set."""
    given = {_flag_part(token) for token in tokens}
    return {
        flag: flag.variable
        for flag in flags
        if flag.variable and environ.get(flag.variable) and not given & {flag.name, f"--no-{flag.name[2:]}"}
    }


def explain(flags: Sequence[Flag], tokens: Sequence[str], prog: str) -> str:
    """The first thing that is wrong with `tokens`, in one line."""
    by_name = {flag.name: flag for flag in flags} | {f"--no-{flag.name[2:]}": flag for flag in flags if flag.is_switch}
    given = set()
    rest = iter(tokens)
    for token in rest:
        flag = by_name.get(_flag_part(token))
        if flag is None:
            return _unknown(token, by_name, prog)
        given.add(flag)
        if flag.is_switch:
            if "=" in token:
                return f"{_flag_part(token)} takes no value: {token!r}"
            continue
        value = token.partition("=")[2] if "=" in token else next(rest, None)
        if value is None:
            return f"{flag.name} needs a value"
        if "=" not in token and _looks_like_flag(value):
            return f"{flag.name} needs a value; if {value!r} is meant, write {flag.name}={value}"
        if (allowed := flag.wrong(value)) is not None:
            return f"{flag.name}={value!r} is not allowed: {allowed}"
    missing = [flag.name for flag in flags if flag.needed and flag not in given]
    return f"{missing[0]} is needed; see {prog} --help" if missing else f"not understood; see {prog} --help"


def _unknown(token: str, known: Mapping[str, Flag], prog: str) -> str:
    if not token.startswith("-"):
        return f"unexpected argument {token!r}; see {prog} --help"
    name = _flag_part(token)
    return f"unknown option {name!r}{did_you_mean(name, list(known))}; see {prog} --help"


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """A question about the one of `known` that is nearest to `word`, or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f", did you mean {near[0]}?" if near else ""


def _refusal(stop: SystemExit) -> AppError | None:
    """The error of ours in whose handling tyro gave up, if that was the reason."""
    return next((error for error in _contexts(stop) if isinstance(error, AppError)), None)


def _contexts(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


def _flag_part(token: str) -> str:
    """The flag that a token names, as tyro reads it: up to the "=", and an underscore counts as a dash."""
    return token.partition("=")[0].replace("_", "-") if token.startswith("-") else ""


def _looks_like_flag(token: str) -> bool:
    return token.startswith("-") and token.lstrip("-")[:1].isalpha()


def _without_none(hint: Any) -> Any:
    """`int | None` -> int, and `tuple[int, ...]` (a flag that may be repeated) -> int; others as they are."""
    inner = [part for part in typing.get_args(hint) if part not in (NoneType, Ellipsis)]
    return inner[0] if len(inner) == 1 and typing.get_origin(hint) is not Literal else hint


def _reads_as(convert: Callable[[str], object]) -> Callable[[str], bool]:
    def accepts(text: str) -> bool:
        try:
            convert(text)
        except ValueError:
            return False
        return True

    return accepts


def _anything(_text: str) -> bool:
    return True


_VALUES: dict[Any, tuple[str, Callable[[str], bool]]] = {
    int: ("a whole number", _reads_as(int)),
    float: ("a number", _reads_as(float)),
    bool: (f"one of {', '.join(TRUE_WORDS + FALSE_WORDS)}", lambda text: text.lower() in TRUE_WORDS + FALSE_WORDS),
}
