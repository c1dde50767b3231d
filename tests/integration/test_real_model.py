"""The bundled model through the command line and through the engine: real prompts, real answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.config.server_args import ServerArgs
from app.containers import build_container
from app.core.sampling import SamplingParams
from app.models.bundled import find_bundled_model
from app.scheduling.engine import generate_all
from app.scheduling.request import Request, RequestOutput

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(find_bundled_model() is None, reason="the bundled model package is not installed"),
]

ROOT = Path(__file__).parents[2]
SYSTEM = "You are a careful assistant. Answer in one short sentence, and say so when you do not know the answer. "
QUESTIONS = ("What is the capital of France?", "What is the capital of Italy?", "What is two plus two?")
SMALL = ("--max-running-requests", "2", "--chunked-prefill-size", "64", "--max-total-tokens", "1024")


def tpukv(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_generate_answers_and_says_what_was_cached():
    arguments = ("generate", "--json", "--system", 8 * SYSTEM, "--max-tokens", "12", *SMALL)

    finished = tpukv(*arguments, stdin="\n".join(QUESTIONS[:2]))

    assert finished.returncode == 0, finished.stderr
    answer = json.loads(finished.stdout)
    assert answer["cache_type"] == "unified_radix_cache"
    assert "covers a model with full" in answer["cache_type_reason"]
    france, italy = answer["outputs"]
    assert "Paris" in france["text"]
    assert "Italy" in italy["text"]
    assert set(france) == {"text", "token_ids", "prompt_tokens", "cached_tokens", "finish_reason"}
    assert france["cached_tokens"] == 0
    # In one batch: the second waited for the first one's prefix instead of computing it again.
    assert 128 <= italy["cached_tokens"] < italy["prompt_tokens"]
    assert italy["cached_tokens"] % 16 == 0


def serve(**settings: object) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Two rounds of the questions on one engine."""
    args = ServerArgs(max_total_tokens=1024, max_running_requests=4, chunked_prefill_size=64, **settings)
    container = build_container(args)
    try:
        tokenizer, scheduler = container.tokenizer(), container.scheduler()
        rounds = []
        for number in range(2):
            requests = [
                Request(
                    request_id=f"{number}-{index}",
                    prompt_token_ids=tokenizer.encode(
                        tokenizer.apply_chat_template(
                            [{"role": "system", "content": 3 * SYSTEM}, {"role": "user", "content": question}]
                        )
                    ),
                    sampling=SamplingParams(max_tokens=10),
                )
                for index, question in enumerate(QUESTIONS)
            ]
            rounds.append(generate_all(scheduler, requests))
            scheduler.check_integrity()
            container.runtime().check_integrity()
        return rounds[0], rounds[1]
    finally:
        container.shutdown_resources()


def test_reuse_changes_no_answer():
    cold, again = serve(cache_type="chunk_cache")
    first, second = serve(cache_type="radix_cache")

    assert [output.cached_tokens for output in cold + again] == [0] * 6
    assert all(output.cached_tokens > 0 for output in second)
    expected = [output.token_ids for output in cold]
    assert [output.token_ids for output in again] == expected
    assert [output.token_ids for output in first] == expected
    assert [output.token_ids for output in second] == expected
    assert "Paris" in cold[0].text


def test_bfloat16_kv_answers_too():
    cold, second = serve(kv_cache_dtype="bfloat16")
    assert "Paris" in cold[0].text
    assert second[0].cached_tokens > 0
    assert "Paris" in second[0].text
