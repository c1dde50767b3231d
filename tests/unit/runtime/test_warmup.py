"""Warming up: what it compiles is what serving runs, and it leaves nothing else behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from app.core.sampling import SamplingParams
from app.errors import OwnershipError
from app.providers.testing import overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from app.tpu.cpu_fake import FakeModelRunner
from app.tpu.failing_runner import FailingRunner, InjectedFailure
from tests.support.compiling import compiled_programs
from tests.support.engine import VOCAB_SIZE, Engine, server_args
from tests.support.paced_model import model_runner
from tests.support.tiny_llama import files_of, tiny_llama

CHUNK = 20
SIZES = {"page_size": 4, "max_total_tokens": 512, "chunked_prefill_size": CHUNK}
CHOOSING: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 5}]
ANYTHING: list[dict[str, Any]] = [
    *CHOOSING,
    {"logprobs": 0},
    {"logprobs": 3, "temperature": 0.5, "min_p": 0.1},
    {"presence_penalty": 0.5},
    {"logit_bias": {3: 1.0}, "temperature": 0.9, "logprobs": 1},
]


def serve_at_random(engine: Engine, sampling: list[dict[str, Any]], num_requests: int = 60) -> None:
    """Requests of many lengths that come, share prefixes, run together and end."""
    random = np.random.default_rng(1)
    shared = random.integers(0, VOCAB_SIZE, 180)
    for _ in range(num_requests):
        own = random.integers(0, VOCAB_SIZE, random.integers(1, 60))
        prompt = np.concatenate([shared[: random.choice([0, 0, 7, 100, 180])], own])
        params = sampling[random.integers(len(sampling))]
        engine.add(prompt.tolist(), max_tokens=int(random.integers(1, 12)), **params)
        engine.step(int(random.integers(0, 4)))
    engine.drain()


@pytest.mark.slow  # compiles the sampler 18 times
def test_after_everything_is_compiled_no_request_compiles_anything(engine: Callable[..., Engine]) -> None:
    opened = engine(**SIZES, max_running_requests=2, context_length=256)
    list(opened.runtime.warm_up("all", CHUNK))

    with compiled_programs() as compiled:
        serve_at_random(opened, ANYTHING)

    assert compiled == []


def test_after_decode_steps_are_compiled_only_prompts_compile_anything() -> None:
    """With the real model, whose programs for prompts have names of their own."""
    model = tiny_llama()
    args = server_args(**SIZES, max_running_requests=2, device="cpu")
    with overridden(args, **files_of(model)) as container:
        list(container.runtime().warm_up("decode", CHUNK))
        random = np.random.default_rng(2)
        requests = [
            Request(
                request_id=str(number),
                prompt_token_ids=random.integers(0, model.vocab_size, random.integers(1, 200)).astype(np.int32),
                sampling=SamplingParams(max_tokens=number + 1, ignore_eos=True, **CHOOSING[number % 3]),
            )
            for number in range(6)
        ]

        with compiled_programs() as compiled:
            generate_all(container.scheduler(), requests)

    assert {name for name in compiled if name.startswith("jit(")} == {"jit(embed)", "jit(_extend)", "jit(_last_logits)"}


def test_nothing_but_programs_is_left(engine: Callable[..., Engine]) -> None:
    opened = engine(**SIZES, max_running_requests=2)
    pages = np.arange(opened.adapter.capacity + 1, dtype=np.int32)

    steps = list(opened.runtime.warm_up("decode", CHUNK))

    fractions = [fraction for _, fraction in steps]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1] < 1) == (0, True)
    assert not opened.container.device_pool().page_contents(pages).any()
    assert not np.asarray(opened.container.req_to_token_pool().device_table()).any()
    assert not np.asarray(opened.container.row_sampling().last_tokens()).any()
    opened.check_idle()


def test_no_level_means_no_step(engine: Callable[..., Engine]) -> None:
    assert list(engine(**SIZES).runtime.warm_up("none", CHUNK)) == []


def test_it_can_be_left_in_the_middle(engine: Callable[..., Engine]) -> None:
    opened = engine(**SIZES)
    warming = opened.runtime.warm_up("decode", CHUNK)
    for _ in range(3):
        next(warming)
    warming.close()

    opened.serve([1, 2, 3], max_tokens=3)
    opened.check_replies()


def test_rows_of_requests_are_left_alone(engine: Callable[..., Engine]) -> None:
    opened = engine(**SIZES)
    warming = opened.runtime.warm_up("decode", CHUNK)
    next(warming)
    opened.add([1, 2, 3], max_tokens=4)
    opened.step()

    with pytest.raises(OwnershipError, match="warm up before requests have any"):
        next(warming)
    opened.drain()
    opened.check_replies()


def test_a_failure_is_raised_and_the_pool_is_new(engine: Callable[..., Engine]) -> None:
    failing = FailingRunner(FakeModelRunner(VOCAB_SIZE), InjectedFailure(step=1, at_dispatch=True))
    opened = engine(**SIZES, overrides=model_runner(failing))
    before = opened.runtime.identity

    with pytest.raises(RuntimeError, match="injected failure"):
        list(opened.runtime.warm_up("decode", CHUNK))

    assert opened.runtime.identity.generation == before.generation + 1
