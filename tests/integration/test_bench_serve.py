"""`tpukv bench serve` and `bench compare` from the command line, against a server on this machine."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.bench.serve.result import RunResult, read_result
from app.cli import Command, main
from app.commands import bench_serve
from app.config.server_args import ServerArgs
from tests.support.openai_server import ScriptedServer, chat_tokens, reply_text, serving

ROOT = Path(__file__).parents[2]
COMMANDS = (
    Command(("bench", "serve"), "", bench_serve.ServeBenchArgs, bench_serve.run_serve, lambda _: ServerArgs()),
    Command(("bench", "compare"), "", bench_serve.CompareArgs, bench_serve.run_compare, lambda _: ServerArgs()),
)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that do not look at the picture do without."""
    monkeypatch.setattr("app.bench.serve.picture.draw_picture", lambda path, runs: path.touch())


def bench(url: str, output: Path, *flags: str) -> int:
    return main(["bench", "serve", "--url", url, "--output", str(output), *flags], COMMANDS)


def measured(server: ScriptedServer, output: Path, *flags: str) -> RunResult:
    with serving(server) as url:
        assert bench(url, output, *flags) == 0
    return read_result(output, "output")


@pytest.mark.parametrize(
    "flags",
    [
        ("--workload", "mooncake", "--conversations", "25"),
        ("--workload", "agent", "--conversations", "3", "--max-tokens", "3"),
        ("--workload", "mtbench", "--conversations", "6", "--max-tokens", "20"),
    ],
    ids=["mooncake", "agent", "mtbench"],
)
def test_one_conversation_at_a_time_reaches_the_ideal(tmp_path, flags) -> None:
    # given a server whose cache has no limit
    server = ScriptedServer()

    # when
    result = measured(server, tmp_path / "a.json", *flags, "--concurrency", "1")

    # then what it says it reused is the ideal, request by request
    assert [row.cached_tokens for row in result.rows] == [row.ideal_cached_tokens for row in result.rows]
    assert result.summary.cached_tokens > 0
    assert result.summary.of_ideal == 1.0
    assert (result.ending, result.summary.failed, result.summary.not_sent) == ("complete", 0, 0)
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


@pytest.mark.usefixtures("undrawn")
def test_the_warm_up_sends_the_same_under_a_salt_and_empties_the_cache_after_it(tmp_path) -> None:
    # given
    server = ScriptedServer()

    # when
    measured(server, tmp_path / "a.json", "--workload", "mtbench", "--conversations", "3", "--max-tokens", "5")

    # then
    before, after = server.log[: server.log.index("flush")], server.log[server.log.index("flush") + 1 :]
    assert len(before) == len(after) == 6
    (salt,) = {body.pop("cache_salt") for body in before}
    assert len(salt) == 32

    def in_order(bodies: list[dict]) -> list[dict]:
        return sorted(bodies, key=lambda body: json.dumps(body))

    assert in_order(before) == in_order(after)


@pytest.mark.usefixtures("undrawn")
def test_without_a_warm_up_nothing_is_salted_or_emptied_and_the_result_says_so(tmp_path) -> None:
    # given
    server = ScriptedServer()

    # when
    result = measured(server, tmp_path / "a.json", "--workload", "mtbench", "--conversations", "2", "--skip-warmup")

    # then
    assert len(server.log) == 4
    assert not any("cache_salt" in body for body in server.log)
    assert "not warmed up" in result.notes[0]


@pytest.mark.usefixtures("undrawn")
def test_the_second_turn_holds_the_servers_own_answer(tmp_path) -> None:
    # given
    server = ScriptedServer()

    # when
    measured(server, tmp_path / "a.json", "--workload", "mtbench", "--conversations", "2", "--skip-warmup")

    # then
    firsts = [body["messages"] for body in server.log if len(body["messages"]) == 2]
    answers = {body["messages"][2]["content"] for body in server.log if len(body["messages"]) == 4}
    assert answers == {reply_text(chat_tokens(messages), 64) for messages in firsts}


@pytest.mark.usefixtures("undrawn")
def test_no_more_conversations_are_sent_at_once_than_asked_for(tmp_path) -> None:
    # given a server that takes its time
    server = ScriptedServer(token_delay_s=0.002)

    # when
    result = measured(server, tmp_path / "a.json", "--workload", "agent", "--conversations", "5", "--concurrency", "3")

    # then
    assert server.most_running == 3
    assert [row.request for row in result.rows] == list(range(len(result.rows)))
    assert result.settings["concurrency"] == 3


@pytest.mark.usefixtures("undrawn")
def test_a_trace_can_be_sent_at_its_own_times(tmp_path) -> None:
    # when three seconds of it pass in three milliseconds
    flags = ("--workload", "mooncake", "--conversations", "12", "--rate", "trace", "--time-scale", "0.001")
    result = measured(ScriptedServer(), tmp_path / "a.json", *flags, "--concurrency", "20")

    # then
    due = [row.due_s - result.rows[0].due_s for row in sorted(result.rows, key=lambda row: row.due_s)]
    assert due == pytest.approx([0.0] * 10 + [0.003] * 2, abs=2e-6)
    assert all(row.sent_s >= row.due_s for row in result.rows)


@pytest.mark.usefixtures("undrawn")
def test_turns_longer_than_the_context_are_left_out_out_loud(tmp_path, capsys) -> None:
    # when
    result = measured(ScriptedServer(max_model_len=8_000), tmp_path / "a.json", "--workload", "agent")

    # then
    assert "turns are left out: longer than the server's context of 8000 tokens" in result.notes[0]
    assert result.notes[0] in " ".join(capsys.readouterr().out.split())
    assert result.summary.failed == 0
    assert max(row.prompt_tokens for row in result.rows) + 16 <= 8_000


@pytest.mark.usefixtures("undrawn")
def test_failures_are_counted_by_kind_and_their_conversations_end(tmp_path, capsys) -> None:
    # given
    server = ScriptedServer(faults={0: "503", 2: "malformed", 3: "error event", 4: "cut", 5: "no usage"})

    # when
    with serving(server) as url:
        code = bench(url, tmp_path / "a.json", "--workload", "mtbench", "--conversations", "9", "--concurrency", "1")

    # then the first question fails at once, the second in its second turn, the next three in their first
    result = read_result(tmp_path / "a.json", "output")
    said = capsys.readouterr()
    assert code == 1
    assert result.summary.failures == {
        "connection lost": 1,
        "error event": 1,
        "malformed": 1,
        "no usage": 1,
        "refused 503": 1,
    }
    assert (result.summary.completed, result.summary.failed, result.summary.not_sent) == (9, 5, 4)
    assert result.rows[0].failure_message == "the queue is full"
    assert "5 of 14 requests failed, the first (request 0" in said.err
    assert "refused 503: the queue is full" in said.err


def test_a_server_that_reuses_nothing_is_compared_with_one_that_does(tmp_path, capsys) -> None:
    # given
    flags = ("--workload", "mtbench", "--conversations", "4", "--max-tokens", "20")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    measured(ScriptedServer(), first, *flags)
    measured(ScriptedServer(reuse=False), second, *flags)
    capsys.readouterr()

    # when
    picture = tmp_path / "both.png"
    code = main(
        ["bench", "compare", "--first", str(first), "--second", str(second), "--picture", str(picture)], COMMANDS
    )

    # then
    out = capsys.readouterr().out
    assert code == 0
    assert "radix_cache" in out
    assert "chunk_cache" in out
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.usefixtures("undrawn")
def test_runs_of_different_workloads_are_not_compared(tmp_path, capsys) -> None:
    # given
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    measured(ScriptedServer(), first, "--workload", "mtbench", "--conversations", "2")
    measured(ScriptedServer(), second, "--workload", "mtbench", "--conversations", "2", "--seed", "1")

    # when
    code = main(["bench", "compare", "--first", str(first), "--second", str(second)], COMMANDS)

    # then
    assert code == 2
    assert "seed is 0 in the first and 1 in the second" in capsys.readouterr().err


@pytest.mark.usefixtures("undrawn")
def test_a_server_without_info_is_measured_without_the_ideal(tmp_path) -> None:
    # when
    result = measured(ScriptedServer(info={}), tmp_path / "a.json", "--workload", "mtbench", "--conversations", "2")

    # then
    assert result.summary.ideal_hit_rate is None
    assert result.summary.hit_rate is not None
    assert "the ideal hit rate is not known: the server does not say its page size" in result.notes


@pytest.mark.usefixtures("undrawn")
def test_without_an_output_the_result_is_named_after_workload_and_cache(tmp_path, monkeypatch) -> None:
    # given
    monkeypatch.chdir(tmp_path)

    # when
    with serving(ScriptedServer()) as url:
        assert main(["bench", "serve", "--url", url, "--workload", "mtbench", "--conversations", "1"], COMMANDS) == 0

    # then
    names = sorted(path.name for path in tmp_path.iterdir())
    assert len(names) == 2
    assert names[0].startswith("mtbench-radix_cache-")
    assert [name.rsplit(".", 1)[1] for name in names] == ["json", "png"]


@contextlib.contextmanager
def own_process(faults: dict[int, str], token_delay_s: float = 0.0) -> Iterator[str]:
    """-> the address of a server in a process of its own, which may die."""
    command = [sys.executable, "-m", "tests.support.openai_server", json.dumps(faults), str(token_delay_s)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
        finally:
            process.kill()


def test_a_server_that_dies_ends_the_run_and_what_was_measured_is_saved(tmp_path, capsys) -> None:
    # when
    flags = ("--workload", "mooncake", "--conversations", "30", "--concurrency", "2", "--skip-warmup")
    with own_process({7: "die"}) as url:
        code = bench(url, tmp_path / "a.json", *flags)

    # then
    result = read_result(tmp_path / "a.json", "output")
    assert code == 1
    assert result.ending == "server gone"
    assert 6 <= result.summary.completed <= 7
    assert result.summary.completed + result.summary.failed + result.summary.not_sent == 30
    assert result.summary.failures
    assert (
        f"the server at {url} went away after {result.summary.completed} completed requests" in capsys.readouterr().err
    )
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_a_server_that_dies_in_the_warm_up_is_an_error_without_a_result(tmp_path, capsys) -> None:
    # given one that hangs up on the first salted request: a fault of no number there, so it dies from outside
    with own_process({}, token_delay_s=0.05) as url:
        program = _program(url, tmp_path / "a.json", "--concurrency", "1")
        assert "warming up" in _until(program, "warming up")

    # when its server was killed at the end of the context
    _, said = program.communicate(timeout=120)

    # then
    assert program.returncode == 2
    assert "went away during the warm-up; nothing was measured" in said
    assert not (tmp_path / "a.json").exists()


def test_an_interrupt_saves_what_was_measured(tmp_path) -> None:
    # given a run of many slow requests
    with own_process({}, token_delay_s=0.02) as url:
        program = _program(url, tmp_path / "a.json", "--concurrency", "2", "--skip-warmup")
        _until(program, "measuring")
        time.sleep(1.0)  # long enough for some request to end; the figures do not depend on it

        # when
        program.send_signal(signal.SIGINT)
        out, said = program.communicate(timeout=120)

    # then
    result = read_result(tmp_path / "a.json", "output")
    assert program.returncode == 130
    assert "interrupted" in said
    assert "note: interrupted" in out
    assert result.ending == "interrupted"
    assert 1 <= result.summary.failures["interrupted"] <= 2
    assert result.summary.not_sent > 0
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


# Ctrl-C counts, also where the tests run in the background of a shell that has it ignored by whoever it starts.
_PROGRAM = """
import signal, sys
from app.cli import main
from tests.integration.test_bench_serve import COMMANDS
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main(sys.argv[1:], COMMANDS))
"""


def _program(url: str, output: Path, *flags: str) -> subprocess.Popen[str]:
    arguments = ["bench", "serve", "--url", url, "--output", str(output), "--workload", "mtbench", *flags]
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _until(program: subprocess.Popen[str], text: str) -> str:
    """Read what it says up to the line with `text`."""
    return next(line for line in program.stderr if text in line)
