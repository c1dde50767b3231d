"""The command line: help, flags, environment, and every way of getting it wrong."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import os
import re
import signal
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog

from app import cli
from app.commands.arguments import flags_of
from app.config.http_args import HttpArgs
from app.config.server_args import ServerArgs
from app.errors import IntegrityError, OutOfPagesError, RequestError, UnknownCacheTypeError

ROOT = Path(__file__).parents[2]
DOCUMENTED = (ServerArgs, HttpArgs, *(command.arguments for command in cli.COMMANDS))
BENCHES = "tree, policies, engine, overlap, tiers, serve, compare"
HELP_LEVELS = [[], *([*command.words] for command in cli.COMMANDS), ["bench"]]


@dataclass(frozen=True, kw_only=True)
class ProbeArgs:
    """Shows the engine's settings as they were read."""

    times: int = 1
    server: ServerArgs = field(default_factory=ServerArgs)


def probe(run: Callable[[ProbeArgs], int]) -> tuple[cli.Command, ...]:
    return (cli.Command(("probe",), "a command for tests", ProbeArgs, run, lambda args: args.server),)


def raising(error: BaseException) -> Callable[[ProbeArgs], int]:
    def run(_args: ProbeArgs) -> int:
        raise error

    return run


@pytest.fixture(autouse=True)
def _own_environment_and_logging(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in os.environ:
        if name.startswith("TPUKV_"):
            monkeypatch.delenv(name)
    yield
    structlog.reset_defaults()  # a command sets logging up for the whole process


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServerArgs]:
    """The settings that a command line gives, with some environment variables set."""

    def settings(*argv: str, **variables: str) -> ServerArgs:
        seen: list[ServerArgs] = []

        def run(args: ProbeArgs) -> int:
            seen.append(args.server)
            return 0

        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert cli.main(["probe", *argv], probe(run)) == 0
        return seen[0]

    return settings


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The one line with which a command line is refused."""

    def message(*argv: str, commands: tuple[cli.Command, ...] = cli.COMMANDS) -> str:
        code = cli.main(list(argv), commands)
        shown = capsys.readouterr()
        assert (code, shown.out) == (2, "")
        assert shown.err.count("\n") == 1
        assert shown.err.endswith("\n")
        assert shown.err.startswith("tpukv: error: ")
        return shown.err.removeprefix("tpukv: error: ").rstrip("\n")

    return message


# -- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", HELP_LEVELS, ids=" ".join)
def test_help_of_every_level_loads_nothing_heavy(words: list[str]) -> None:
    """What makes help quick; how quick, docs/benchmarks.md says."""
    code = (
        "import sys; from app.cli import main; code = main();"
        "heavy = {'jax', 'jaxlib', 'numpy', 'structlog', 'dependency_injector', 'tokenizers'} & set(sys.modules);"
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code, *words, "--help"], capture_output=True, text=True, cwd=ROOT)

    assert result.stderr == "0 []\n"
    assert result.stdout.startswith(" ".join(["usage: tpukv", *words]))


def test_help_shows_every_setting_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "--help"]) == 0

    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for setting in dataclasses.fields(ServerArgs):
        assert f"--{setting.name.replace('_', '-')}" in text
        assert f"(default: {setting.default!r})".replace("'", "") in text.replace("'", "")


def test_module_and_console_script_are_the_same_program() -> None:
    result = subprocess.run([sys.executable, "-m", "app", "bench"], capture_output=True, text=True, cwd=ROOT)

    assert result.returncode == 2
    assert result.stderr == f"tpukv: error: tpukv bench needs a command: one of {BENCHES}\n"


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "tpukv needs a command: one of serve, generate, demo, doctor, bench, cache"),
        (
            "generat",
            "tpukv has no command 'generat', did you mean generate?: "
            "one of serve, generate, demo, doctor, bench, cache",
        ),
        ("bench", f"tpukv bench needs a command: one of {BENCHES}"),
        (
            "bench tre",
            f"tpukv bench has no command 'tre', did you mean tree?: one of {BENCHES}",
        ),
        (
            "--page-size 4 generate",
            "'--page-size' stands before the command: options come after "
            "one of serve, generate, demo, doctor, bench, cache",
        ),
        ("generate demo", "unexpected argument 'demo'; see tpukv generate --help"),
        ("generate generate", "unexpected argument 'generate'; see tpukv generate --help"),
        ("generate --json hello", "unexpected argument 'hello'; see tpukv generate --help"),
        ("doctor --pag-size 4", "unknown option '--pag-size', did you mean --page-size?; see tpukv doctor --help"),
        ("doctor --zzz", "unknown option '--zzz'; see tpukv doctor --help"),
        ("doctor --tyro-print-completion x", "unknown option '--tyro-print-completion'; see tpukv doctor --help"),
        ("doctor -p 4", "unknown option '-p'; see tpukv doctor --help"),
        ("doctor --page-size", "--page-size needs a value"),
        ("doctor --model-path --json", "--model-path needs a value; if '--json' is meant, write --model-path=--json"),
        ("doctor --page-size many", "--page-size='many' is not allowed: a whole number"),
        ("doctor --page-size=", "--page-size='' is not allowed: a whole number"),
        ("doctor --page-size 1.5", "--page-size='1.5' is not allowed: a whole number"),
        ("doctor --page-size 0", "--page-size=0 is not allowed: a whole number, 1 to 1024"),
        ("doctor --page_size 0", "--page-size=0 is not allowed: a whole number, 1 to 1024"),
        ("doctor --max-total-tokens None", "--max-total-tokens='None' is not allowed: a whole number"),
        ("doctor --dtype float16", "--dtype='float16' is not allowed: one of auto, float32, bfloat16"),
        (
            "doctor --eviction-policy fifo",
            "--eviction-policy='fifo' is not allowed: one of lru, lfu, slru, priority, hit_density",
        ),
        ("doctor --check-invariants=yes", "--check-invariants takes no value: '--check-invariants=yes'"),
        ("doctor --check-invariants yes", "unexpected argument 'yes'; see tpukv doctor --help"),
        ("doctor --dp-size 2", "--dp-size=2 is not allowed: 1; more than one is not yet supported"),
        (
            "doctor --page-size 32 --max-total-tokens 40",
            "--max-total-tokens=40 cannot be combined with --page-size=32: the pool needs at least 2 pages, 64 tokens",
        ),
        ("generate --temperature hot", "--temperature='hot' is not allowed: a number"),
        ("generate --prompt x --top-p 0", "--top-p=0.0 is not allowed: more than 0, at most 1"),
        ("generate --prompt x --min-tokens 9 --max-tokens 8", "--min-tokens=9 is not allowed: 0 to max_tokens (8)"),
        ("generate --stop-token-ids 1 --stop-token-ids x", "--stop-token-ids='x' is not allowed: a whole number"),
        ("bench tree", "--trace is needed; see tpukv bench tree --help"),
        ("bench tree --trace /no/such/file", "--trace='/no/such/file' is not allowed: a file that exists"),
        ("bench tree --trace /dev/null --pool-fraction x", "--pool-fraction='x' is not allowed: a number"),
    ],
)
def test_refusal_is_one_line_with_field_value_and_what_is_allowed(
    refused: Callable[..., str], argv: str, message: str
) -> None:
    assert refused(*argv.split()) == message


def test_the_first_wrong_argument_is_reported_the_same_way_every_time(refused: Callable[..., str]) -> None:
    argv = ["doctor", "--dtype", "x", "--page-size", "y", "--nothing"]

    assert {refused(*argv) for _ in range(3)} == {"--dtype='x' is not allowed: one of auto, float32, bfloat16"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RequestError(field="times", value=3, allowed="less"), "--times=3 is not allowed: less"),
        (RequestError(field="elsewhere", value=3, allowed="less"), "elsewhere=3 is not allowed: less"),
        (
            UnknownCacheTypeError(name="a\nb", known=("c",)),
            "--cache-type='a\\nb' is not allowed: known cache types are c",
        ),
        (
            OutOfPagesError(need=2, free=1),
            "2 pages are needed and 1 are free: evict, retract a request, or wait for one to finish",
        ),
    ],
)
def test_what_a_command_refuses_is_told_in_one_line(
    refused: Callable[..., str], error: Exception, message: str
) -> None:
    assert refused("probe", commands=probe(raising(error))) == message


# -- environment -----------------------------------------------------------------------------------------------------


def test_every_setting_has_its_environment_variable() -> None:
    variables = {flag.variable for flag in flags_of(cli.COMMANDS[0].arguments)} - {None}

    settings = [*dataclasses.fields(ServerArgs), *dataclasses.fields(HttpArgs)]
    assert variables == {f"TPUKV_{setting.name.upper()}" for setting in settings}


def test_environment_sets_what_the_command_line_does_not(read: Callable[..., ServerArgs]) -> None:
    args = read("--page-size", "8", TPUKV_PAGE_SIZE="4", TPUKV_CACHE_TYPE="chunk_cache", TPUKV_MAX_TOTAL_TOKENS="64")

    assert (args.page_size, args.cache_type, args.max_total_tokens) == (8, "chunk_cache", 64)


@pytest.mark.parametrize("flag", ["--page_size=8", "--page-size=8"])
def test_a_flag_wins_over_a_wrong_variable(read: Callable[..., ServerArgs], flag: str) -> None:
    assert read(flag, TPUKV_PAGE_SIZE="junk").page_size == 8


@pytest.mark.parametrize(("text", "value"), [("1", True), ("True", True), ("on", True), ("0", False), ("no", False)])
def test_switches_are_words_in_the_environment(read: Callable[..., ServerArgs], text: str, value: bool) -> None:
    assert read(TPUKV_CHECK_INVARIANTS=text).check_invariants is value


def test_a_switch_of_the_environment_can_be_taken_back(read: Callable[..., ServerArgs]) -> None:
    assert read("--no-check-invariants", TPUKV_CHECK_INVARIANTS="1").check_invariants is False


def test_an_empty_variable_is_not_set(read: Callable[..., ServerArgs]) -> None:
    assert read(TPUKV_PAGE_SIZE="") == ServerArgs()


def test_a_value_from_the_environment_may_look_like_a_flag(read: Callable[..., ServerArgs]) -> None:
    assert read(TPUKV_MODEL_PATH="--odd").model_path == "--odd"


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        (
            "PAGE_SIZE",
            "big",
            "TPUKV_PAGE_SIZE='big' (environment variable) is not allowed for --page-size: a whole number",
        ),
        (
            "LOG_FORMAT",
            "xml",
            "TPUKV_LOG_FORMAT='xml' (environment variable) is not allowed for --log-format: one of console, json",
        ),
        (
            "CHECK_INVARIANTS",
            "maybe",
            "TPUKV_CHECK_INVARIANTS='maybe' (environment variable) is not allowed for --check-invariants: "
            "one of 1, true, yes, on, 0, false, no, off",
        ),
        ("PAGE_SIZE", "0", "--page-size=0 is not allowed: a whole number, 1 to 1024 (set by TPUKV_PAGE_SIZE)"),
    ],
)
def test_a_wrong_variable_is_refused_by_its_name(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, variable: str, text: str, message: str
) -> None:
    monkeypatch.setenv(f"TPUKV_{variable}", text)

    assert refused("doctor") == message


def test_a_refusal_long_after_parsing_names_the_variable_too(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPUKV_CACHE_TYPE", "mine")
    unknown = UnknownCacheTypeError(name="mine", known=("chunk_cache",))

    message = refused("probe", commands=probe(raising(unknown)))

    assert message.endswith("known cache types are chunk_cache (set by TPUKV_CACHE_TYPE)")


# -- going wrong, and being stopped ----------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError("oh\nno"), IntegrityError(owner="tree", broken="oh no")])
def test_a_bug_is_one_line_with_its_type_and_a_hint(capsys: pytest.CaptureFixture[str], error: Exception) -> None:
    assert cli.main(["probe"], probe(raising(error))) == 1

    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert shown.startswith(f"tpukv: internal error: {type(error).__name__}: ")
    assert shown.endswith("oh no; --log-level debug shows where\n")


def test_a_bug_shows_where_at_log_level_debug(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "--log-level", "debug"], probe(raising(ZeroDivisionError("oh")))) == 1

    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_ends_with_130_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe"], probe(raising(KeyboardInterrupt()))) == 130

    assert capsys.readouterr().err == "tpukv: interrupted\n"


def test_a_reader_that_goes_away_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "generate", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    )
    assert process.stdout is not None
    process.stdout.close()

    _, errors = process.communicate(timeout=20)

    assert errors == b""
    assert process.returncode == 128 + signal.SIGPIPE


# -- documentation ---------------------------------------------------------------------------------------------------


def test_documentation_lists_every_flag_as_it_is() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")

    rows = [row for row in written.splitlines() if re.match(r"\| `--\S+` \| `", row)]

    assert rows == [row for cls in DOCUMENTED for row in _rows(cls)]


def _rows(cls: type) -> Iterator[str]:
    """One row a flag: its name, its default, and the text under the field, as the help shows it."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    defaults = {entry.name: entry.default for entry in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    for entry, text in itertools.pairwise(definition.body):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            hint = hints[entry.target.id]
            if dataclasses.is_dataclass(hint):
                # Settings of engine and server are told once, for all commands.
                yield from () if hint in DOCUMENTED[:2] else _rows(hint)
                continue
            assert isinstance(text, ast.Expr)
            shown = _shown(defaults[entry.target.id])
            yield f"| `--{entry.target.id.replace('_', '-')}` | `{shown}` | {ast.literal_eval(text.value)} |"


def _shown(default: object) -> str:
    if default is dataclasses.MISSING:
        return "needed"
    return "empty" if default == "" else "none" if default in (None, ()) else str(default)
