"""`tpukv serve` as its user meets it: a ready line with a command to paste, signals, refusals in one line."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.models.bundled import BUNDLED_MODEL_NAME, find_bundled_model
from tests.support.asking import COMPLETIONS, PATIENCE_S

ROOT = Path(__file__).parents[2]
SMALL = ("--max-running-requests", "2", "--chunked-prefill-size", "64", "--max-total-tokens", "1024")
STARTING_S = 280  # a model that was never converted takes long on a busy machine
KEY = "a-secret-key"

needs_model = [
    pytest.mark.model,
    pytest.mark.skipif(find_bundled_model() is None, reason="the bundled model package is not installed"),
]


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TPUKV_") or "CACHE" in name}
    return {**kept, **variables}


@contextmanager
def serving(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """-> the process, and its ready line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "serve", *SMALL, "--log-level", "error", *arguments],
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert ready, process.communicate(timeout=STARTING_S)[1]
            yield process, ready
        finally:
            process.kill()


def pasted(command: str) -> str:
    """What a user sees who pastes it into a shell where TPUKV_API_KEY is set."""
    return subprocess.run(
        ["sh", "-c", command],
        env=environment(TPUKV_API_KEY=KEY),
        capture_output=True,
        text=True,
        timeout=STARTING_S,
        check=True,
    ).stdout


def url_of(ready: str) -> str:
    return ready.partition(" at ")[2].partition(" ")[0]


def refusal(*arguments: str, **variables: str) -> str:
    """What `serve` says as it refuses these arguments: one line on stderr and nothing else, with code 2."""
    finished = subprocess.run(
        [sys.executable, "-m", "app", "serve", *arguments],
        cwd=ROOT,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=STARTING_S,
        check=False,
    )
    assert (finished.returncode, finished.stdout) == (2, ""), finished.stderr
    assert finished.stderr.count("\n") == 1
    assert finished.stderr.startswith("tpukv: error: ")
    return finished.stderr


class TestRunning:
    """Whole runs with the bundled model."""

    pytestmark = needs_model

    @pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
    def test_the_pasted_command_is_answered_and_sigterm_ends_the_server_with_0(self) -> None:
        with serving(TPUKV_PORT="0", TPUKV_API_KEY=KEY) as (process, ready):
            # given
            assert ready.startswith(f"tpukv: ready: {BUNDLED_MODEL_NAME} at http://127.0.0.1:")
            assert KEY not in ready
            command = ready.partition("; try: ")[2]

            # when: as a shell runs it, where the key is a variable; twice
            first, second = (json.loads(pasted(command)) for _ in range(2))

            # then
            assert shlex.split(command)[0] == "curl"
            assert "Paris" in first["choices"][0]["message"]["content"]
            assert second["choices"] == first["choices"]
            assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            assert httpx.get(f"{url_of(ready)}/v1/models", trust_env=False).status_code == 401
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, errors) == (0, "")

    def test_ctrl_c_ends_the_server_with_0_though_a_request_runs(self) -> None:
        events = ("--kv-events-config", '{"endpoint": "tcp://127.0.0.1:*", "replay_endpoint": "tcp://127.0.0.1:*"}')
        with serving("--port", "0", "--shutdown-timeout", "0.2", *events) as (process, ready):
            # given
            asked = {"model": BUNDLED_MODEL_NAME, "prompt": "One, two,", "max_tokens": 900, "stream": True}
            asked["ignore_eos"] = True
            with httpx.stream(
                "POST", f"{url_of(ready)}{COMPLETIONS}", json=asked, timeout=STARTING_S, trust_env=False
            ) as reply:
                lines = reply.iter_lines()
                assert "text_completion" in next(lines)

                # when
                process.send_signal(signal.SIGINT)

                # then
                *_, last_choice, done = [line for line in lines if line]
            assert '"finish_reason":"abort"' in last_choice
            assert done == "data: [DONE]"
            _, errors = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, errors) == (0, "")


def test_a_port_in_use_is_refused_before_the_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal("--port", str(port), "--model-path", "/nowhere.gguf")
        by_variable = refusal("--model-path", "/nowhere.gguf", TPUKV_PORT=str(port))

    assert f"--port={port} is not allowed: a port that is free on 127.0.0.1" in said
    assert "TPUKV_PORT" in by_variable


def test_an_address_that_others_reach_needs_a_key() -> None:
    said = refusal("--host", "0.0.0.0")

    assert "--host='0.0.0.0'" in said
    assert "--api-key" in said
    assert "--open-to-network" in said


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--prot", "1"), ("--prot", "--port")),
        (("--port", "70000"), ("--port=70000", "65535")),
        (("--max-queued-requests", "-1"), ("--max-queued-requests=-1",)),
        (("--kv-events-config", "zmq"), ("--kv-events-config='zmq'", "replay_endpoint")),
        (("--host", "192.0.2.1", "--api-key", KEY), ("--host='192.0.2.1'", "an address of this machine")),
        (("--api-key", "with a line\nend"), ("--api-key='***'",)),
    ],
    ids=lambda value: value[0],
)
def test_a_wrong_flag_is_refused_by_its_name(arguments: tuple[str, ...], named: tuple[str, ...]) -> None:
    said = refusal(*arguments)

    for each in named:
        assert each in said
