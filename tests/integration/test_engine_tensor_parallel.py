"""The whole engine on 1, 2, 4 and 8 devices gives the same tokens; on 8 forced CPU devices of another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

SERVE_ON_EACH_SIZE = """
import json

import numpy as np
from app.config.server_args import ServerArgs
from app.core.sampling import SamplingParams
from app.providers.testing import overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from tests.support.tiny_llama import files_of, tiny_llama

model = tiny_llama(vocab_size=64, hidden_size=32, intermediate_size=64, num_heads=8, num_kv_heads=2, context_length=128)
rng = np.random.default_rng(0)
shared = rng.integers(0, 64, 40).astype(np.int32)
prompts = [np.concatenate([shared[: 10 * n], rng.integers(0, 64, 5).astype(np.int32)]) for n in range(1, 5)]
answers = {}
for tp_size in (1, 2, 4, 8):
    args = ServerArgs(tp_size=tp_size, page_size=8, max_total_tokens=256, max_running_requests=4, device="cpu",
                      chunked_prefill_size=16)
    with overridden(args, **files_of(model, seed=1)) as container:
        requests = [
            Request(request_id=str(n), prompt_token_ids=prompt,
                    sampling=SamplingParams(max_tokens=12, temperature=0.0 if n % 2 else 0.7, seed=n))
            for n, prompt in enumerate(prompts)
        ]
        outputs = generate_all(container.scheduler(), requests)
        container.scheduler().check_integrity()
        container.runtime().check_integrity()
        answers[tp_size] = [output.token_ids for output in outputs]
        assert container.mesh().devices.size == tp_size
        assert container.device_pool().spec.num_kv_heads == max(2, tp_size)
print(json.dumps(answers))
"""


def test_every_tensor_parallel_size_gives_the_same_tokens():
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(
        [sys.executable, "-c", SERVE_ON_EACH_SIZE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    answers = json.loads(finished.stdout)
    assert all(answers[size] == answers["1"] for size in ("2", "4", "8"))
    assert all(len(tokens) == 12 for tokens in answers["1"])
