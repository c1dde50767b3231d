"""What a run is asked to do is checked before anything is sent, and every refusal names its flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.bench.serve.failures import MissingExtraError, require_extra
from app.bench.serve.settings import LoadSettings, Target, WorkloadSettings
from app.cli import PROG, Command, main
from app.commands import bench_serve
from app.commands.arguments import parse
from app.commands.bench_serve import CompareArgs, ServeBenchArgs
from app.config.server_args import ServerArgs
from app.errors import ConfigError

COMMANDS = (
    Command(("bench", "serve"), "", ServeBenchArgs, bench_serve.run_serve, lambda _: ServerArgs()),
    Command(("bench", "compare"), "", CompareArgs, bench_serve.run_compare, lambda _: ServerArgs()),
)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ([], "--workload is needed"),
        (["--workload", "chat"], "--workload='chat' is not allowed: one of mooncake, agent, mtbench"),
        (["--workload", "agent", "--url", "localhost"], "--url='localhost' is not allowed"),
        (["--workload", "agent", "--url", "ftp://x"], "--url='ftp://x' is not allowed"),
        (["--workload", "agent", "--url", "http://x:port"], "--url='http://x:port' is not allowed"),
        (["--workload", "agent", "--timeout", "0"], "--timeout=0.0 is not allowed"),
        (["--workload", "agent", "--timeout", "nan"], "--timeout=nan is not allowed"),
        (["--workload", "agent", "--concurrency", "0"], "--concurrency=0 is not allowed: 1 or more"),
        (["--workload", "agent", "--rate", "fast"], "--rate='fast' is not allowed"),
        (["--workload", "agent", "--rate=-1"], "--rate='-1' is not allowed"),
        (["--workload", "agent", "--rate", "nan"], "--rate='nan' is not allowed"),
        (["--workload", "agent", "--rate", "trace"], "--rate='trace' cannot be combined with --workload='agent'"),
        (["--workload", "mooncake", "--time-scale", "2"], "--time-scale=2.0 cannot be combined with --rate='0'"),
        (["--workload", "mooncake", "--rate", "trace", "--time-scale", "0"], "--time-scale=0.0 is not allowed"),
        (["--workload", "mooncake", "--max-tokens", "5"], "--max-tokens=5 cannot be combined with --workload"),
        (["--workload", "mooncake", "--length-scale", "2"], "--length-scale=2.0 is not allowed"),
        (["--workload", "mooncake", "--max-prompt-tokens", "0"], "--max-prompt-tokens=0 is not allowed"),
        (["--workload", "mooncake", "--vocab-size", "1"], "--vocab-size=1 is not allowed"),
        (["--workload", "agent", "--length-scale", "0.5"], "--length-scale=0.5 cannot be combined with --workload"),
        (["--workload", "mtbench", "--vocab-size", "9"], "--vocab-size=9 cannot be combined with --workload"),
        (["--workload", "mtbench", "--conversations", "0"], "--conversations=0 is not allowed"),
        (["--workload", "mtbench", "--seed=-1"], "--seed=-1 is not allowed"),
        (["--workload", "mtbench", "--max-tokens", "0"], "--max-tokens=0 is not allowed"),
        (["--workload", "mtbench", "--output", "a.txt"], "--output='a.txt' is not allowed"),
        (["--workload", "mtbench", "--output", "no/such/a.json"], "--output='no/such/a.json' is not allowed"),
        (["--workload", "mtbench", "--picture", "a.svg"], "--picture='a.svg' is not allowed"),
        (["--workload", "mtbench", "--data", "nowhere"], "--data='nowhere' is not allowed"),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line_that_names_it(capsys, flags, text) -> None:
    # when
    code = main(["bench", "serve", *flags], COMMANDS)

    # then
    said = capsys.readouterr().err
    assert code == 2
    assert text in said
    assert said.count("\n") == 1


def test_flags_reach_their_settings() -> None:
    # when
    flags = [
        "--workload",
        "mooncake",
        "--rate",
        "trace",
        "--time-scale",
        "0.5",
        "--api-key",
        "secret",
        "--url",
        "http://a:1",
    ]
    args = parse(ServeBenchArgs, PROG, flags, {})

    # then
    assert args.workload == WorkloadSettings(workload="mooncake")
    assert args.load == LoadSettings(rate="trace", time_scale=0.5)
    assert args.target == Target(url="http://a:1", api_key="secret")
    assert "secret" not in repr(args)


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.bench.serve.failures.find_spec", lambda name: None if name == "matplotlib" else object())
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed.*tpukv\[bench\].*make bench-serve"):
        require_extra()


def test_a_server_that_is_not_there_is_told_in_one_line(capsys, tmp_path, monkeypatch) -> None:
    # given
    monkeypatch.chdir(tmp_path)

    # when
    code = main(["bench", "serve", "--workload", "agent", "--url", "http://127.0.0.1:1"], COMMANDS)

    # then
    said = capsys.readouterr().err
    assert code == 2
    assert "error: the server at http://127.0.0.1:1 could not be asked for /v1/models" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "text"),
    [(None, "it cannot be read"), ("no json", "a result file of"), ('{"version": 1}', "a result file of")],
)
def test_compare_refuses_what_is_no_result_naming_the_flag(capsys, tmp_path, content, text) -> None:
    # given
    path = tmp_path / "first.json"
    if content is not None:
        path.write_text(content)

    # when
    code = main(["bench", "compare", "--first", str(path), "--second", str(path)], COMMANDS)

    # then
    said = capsys.readouterr().err
    assert code == 2
    assert f"--first='{path}'" in said
    assert text in said


def test_replies_have_a_length_for_each_workload() -> None:
    assert WorkloadSettings(workload="agent").reply_tokens == 16
    assert WorkloadSettings(workload="mtbench").reply_tokens == 64
    assert WorkloadSettings(workload="mtbench", max_tokens=5).reply_tokens == 5


def test_a_folder_is_no_output(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(ConfigError, match="output="):
        ServeBenchArgs(workload=WorkloadSettings(workload="agent"), output=tmp_path / "a.json")
