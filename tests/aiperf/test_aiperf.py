"""aiperf, a public load generator, as it comes, against the server with the bundled model.

It lives in an environment of its own, .venv-aiperf, that `make test-aiperf` makes from requirements.txt.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.models.bundled import BUNDLED_MODEL_NAME, find_bundled_model
from app.models.checkpoint import open_checkpoint
from tests.support.soak_site import Figures, read_figures

ROOT = Path(__file__).parents[2]
AIPERF = ROOT / ".venv-aiperf" / "bin" / "aiperf"
TRACE = ROOT / "tests" / "data" / "mooncake_sample.jsonl"
pytestmark = [
    pytest.mark.aiperf,
    pytest.mark.model,
    pytest.mark.skipif(not AIPERF.exists(), reason="aiperf is not installed: make test-aiperf"),
    pytest.mark.skipif(find_bundled_model() is None, reason="the bundled model package is not installed"),
]

TOKENIZER = f"local/{BUNDLED_MODEL_NAME}"
COMMIT = "0" * 40
SERVE = ("--port", "0", "--context-length", "1024", "--max-total-tokens", "8192", "--max-running-requests", "4")
HANGS_AFTER_S = 1200

# The trace is of a much larger model: its blocks of 512 tokens become pages of 16, and all lengths shrink alike.
TRACE_BLOCK, BLOCK = 512, 16
TRACE_LINES = 24
LONGEST_PROMPT = 700  # what fits the server's context with an answer and the words around a chat
ANSWER_RATIO = 32
SPEED_UP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A server of its own process. `home`: where aiperf finds the tokenizer and leaves what it writes."""

    url: str
    home: Path

    def figures(self) -> Figures:
        return read_figures(httpx.get(f"{self.url}/metrics").raise_for_status().text)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Stopped by a signal at the end, which must end it cleanly."""
    command = [sys.executable, "-m", "app", "serve", *SERVE]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            ready = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:\d+", ready)
            assert found, ready
            home = tmp_path_factory.mktemp("aiperf")
            put_tokenizer(home)
            yield Served(url=found[0], home=home)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
    assert process.returncode == 0


def put_tokenizer(home: Path) -> None:
    """The model's own, where a hub client without a network looks for what it has."""
    model = home / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "snapshots").mkdir()
    (model / "snapshots" / COMMIT).symlink_to(open_checkpoint(str(find_bundled_model())).folder)


def aiperf(served: Served, name: str, *arguments: str) -> dict[str, Any]:
    """Run it to its end. -> its report, which it also leaves as text in `home`/`name`."""
    results = served.home / name
    command = [str(AIPERF), "profile", "--model", BUNDLED_MODEL_NAME, "--url", served.url]
    command += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count", "--tokenizer", TOKENIZER]
    command += ["--extra-inputs", "temperature:0", "--extra-inputs", "ignore_eos:true", "--random-seed", "1"]
    command += ["--ui", "simple", "--artifact-dir", str(results), *arguments]
    # Nothing from a network, and nothing left outside of `home`.
    offline = {"HF_HUB_OFFLINE": "1", **{name: str(served.home) for name in ("HOME", "HF_HOME", "TMPDIR")}}
    ran = subprocess.run(
        command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=HANGS_AFTER_S, cwd=served.home
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]
    print((results / "profile_export_console.txt").read_text())
    report: dict[str, Any] = json.loads((results / "profile_export_aiperf.json").read_text())
    return report


def check_agreement(report: Mapping[str, Any], before: Figures, after: Figures, requests: int) -> None:
    """All went well, and both sides counted the same."""
    assert report["is_complete"]
    assert not report["was_cancelled"]
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == requests
    assert after.ended - before.ended == Counter({"length": requests})
    assert after.refused == before.refused
    assert report["total_usage_prompt_tokens"]["avg"] == after.prompt_tokens - before.prompt_tokens
    assert report["total_usage_completion_tokens"]["avg"] == after.output_tokens - before.output_tokens
    assert report["total_usage_prompt_cache_read_tokens"]["avg"] == after.cached_tokens - before.cached_tokens


def test_synthetic_chats_are_all_served_and_counted_alike(served: Served) -> None:
    before = served.figures()

    report = aiperf(
        served, "synthetic", "--concurrency", "4", "--request-count", "20", "--isl", "200", "--isl-stddev", "40",
        "--osl", "32",
    )  # fmt: skip

    check_agreement(report, before, served.figures(), requests=20)
    assert report["total_usage_completion_tokens"]["avg"] == 20 * 32


def test_a_mooncake_trace_is_replayed_and_counted_alike(served: Served, tmp_path: Path) -> None:
    requests = scaled(TRACE)
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(request) + "\n" for request in requests))
    before = served.figures()

    report = aiperf(
        served, "mooncake", "--input-file", str(trace), "--custom-dataset-type", "mooncake_trace",
        "--isl-block-size", str(BLOCK), "--fixed-schedule",
    )  # fmt: skip

    after = served.figures()
    check_agreement(report, before, after, requests=len(requests))
    assert report["total_usage_completion_tokens"]["avg"] == sum(request["output_length"] for request in requests)
    assert after.cached_tokens > before.cached_tokens


def scaled(trace: Path) -> list[dict[str, Any]]:
    """The first requests of a trace, shrunk; those that stay too long for the server's context are left out."""
    ratio = TRACE_BLOCK // BLOCK
    requests = []
    for line in trace.read_text().splitlines()[:TRACE_LINES]:
        request = json.loads(line)
        input_length = -(-request["input_length"] // ratio)
        if input_length <= LONGEST_PROMPT:
            requests.append(
                {
                    "timestamp": request["timestamp"] // SPEED_UP,
                    "input_length": input_length,
                    "output_length": -(-request["output_length"] // ANSWER_RATIO),
                    "hash_ids": request["hash_ids"],
                }
            )
    return requests
