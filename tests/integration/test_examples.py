"""The examples run, and their output is that of the engine."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np

from app.config.server_args import ServerArgs
from app.core.sampling import SamplingParams
from app.providers.testing import overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_foreign_scheduler_needs_only_the_cache_and_the_runtime():
    serve = runpy.run_path(str(EXAMPLES / "foreign_scheduler.py"))["serve"]
    prompts = [np.arange(1, 40, dtype=np.int32), np.arange(1, 61, dtype=np.int32), np.arange(1, 40, dtype=np.int32)]
    args = ServerArgs(page_size=4, max_total_tokens=128)  # small: serving all of them means evicting
    with overridden(args, fake=True) as container:
        cache, runtime = container.tree_cache(), container.runtime()
        answers = [serve(cache, runtime, prompt, 8) for prompt in prompts]
        container.scheduler_adapter().check_integrity()
        runtime.check_integrity()
    with overridden(args, fake=True) as container:
        params = SamplingParams(max_tokens=8, ignore_eos=True)
        requests = [
            Request(request_id=str(number), prompt_token_ids=prompt, sampling=params)
            for number, prompt in enumerate(prompts)
        ]
        outputs = [generate_all(container.scheduler(), [request])[0] for request in requests]
    assert [tokens for tokens, _ in answers] == [output.token_ids for output in outputs]
    assert [cached for _, cached in answers] == [output.cached_tokens for output in outputs]
    assert answers[2][1] > 0


def test_swapping_the_device_pool_for_the_fake():
    main = runpy.run_path(str(EXAMPLES / "fake_device_pool.py"))["main"]
    assert all(main())
