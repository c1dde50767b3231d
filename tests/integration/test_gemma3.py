"""Gemma 3 270M, a real model with windows, from its GGUF file: `make test-gemma3` fetches it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.config.server_args import ServerArgs
from app.containers import build_container
from app.core.sampling import SamplingParams
from app.scheduling.engine import generate_all
from app.scheduling.request import Request, RequestOutput

FILE = Path(__file__).parents[2] / ".gemma3" / "gemma-3-270m.gguf"
WINDOW = 512
DIGEST = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
PASSAGE = "The capital of France is Paris. The capital of Italy is Rome. Water is made of hydrogen and oxygen. "

pytestmark = [pytest.mark.gemma3, pytest.mark.skipif(not FILE.is_file(), reason="make test-gemma3 fetches the model")]


def serve(cache_type: str, prompts: list[str]) -> list[RequestOutput]:
    """One after the other, on one engine."""
    args = ServerArgs(
        model_path=str(FILE),
        cache_type=cache_type,
        max_total_tokens=4096,
        max_running_requests=2,
        chunked_prefill_size=256,
    )
    container = build_container(args)
    try:
        assert container.checkpoint().digest == DIGEST
        scheduler, tokenizer = container.scheduler(), container.tokenizer()
        outputs = []
        for number, prompt in enumerate(prompts):
            ids: np.ndarray = tokenizer.encode(f"<bos>{prompt}")
            request = Request(request_id=str(number), prompt_token_ids=ids, sampling=SamplingParams(max_tokens=8))
            outputs += generate_all(scheduler, [request])
        scheduler.check_integrity()
        container.runtime().check_integrity()
        return outputs
    finally:
        container.shutdown_resources()


def test_a_hit_longer_than_the_window_changes_no_answer() -> None:
    long = 30 * PASSAGE
    prompts = [long + "The capital of France is", long + "The capital of Italy is", long + "The capital of France is"]

    cold, warm = serve("chunk_cache", prompts), serve("unified_radix_cache", prompts)

    assert cold[0].prompt_tokens > WINDOW
    assert [output.cached_tokens for output in cold] == [0, 0, 0]
    assert warm[0].cached_tokens == 0
    assert all(output.cached_tokens > WINDOW for output in warm[1:])
    assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
    assert [output.text.split(".")[0] for output in cold] == [" Paris", " Rome", " Paris"]
