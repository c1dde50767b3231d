"""Run in a process of its own with 8 CPU devices: the whole engine at several tensor-parallel sizes. Prints JSON."""

from __future__ import annotations

import json
from typing import Any

import jax
import numpy as np

from app.core.sampling import SamplingParams
from app.providers.testing import overridden
from app.scheduling.request import Request
from tests.support.engine import RuntimeSpy
from tests.support.tensor_parallel_check import pointers
from tests.support.tiny_llama import files_of, tiny_llama
from tests.support.two_nodes import digest, settings

MODEL = tiny_llama(vocab_size=64, hidden_size=32, intermediate_size=64, num_heads=8, num_kv_heads=2, context_length=64)
SIZES = (1, 2, 8)
DTYPES = ("float32", "bfloat16")  # of the pool; bfloat16 is kept as bits on CPU


def requests() -> list[Request]:
    """Prompts of one and of several chunks, the longer ones behind a prefix that the others leave in the cache."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 64, 32).astype(np.int32)
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=np.concatenate([shared[: 8 * number], rng.integers(0, 64, 5).astype(np.int32)]),
            sampling=SamplingParams(max_tokens=6, ignore_eos=True, logprobs=2),
        )
        for number in range(1, 5)
    ]


def run(tp_size: int, dtype: str) -> dict[str, Any]:
    with overridden(settings(tp_size=tp_size, kv_cache_dtype=dtype), **files_of(MODEL, seed=1)) as container:
        scheduler, runtime, pool = container.scheduler(), container.runtime(), container.device_pool()
        spy = RuntimeSpy(runtime)
        for request in requests():
            scheduler.add(request)
        outputs, steps = {}, []
        while scheduler.has_work():
            seen, before = len(spy.plans), _arrays(pool)
            places = [pointers(array) for array in before]
            outputs.update((output.request_id, output) for output in scheduler.step())
            steps.append(
                {
                    "decodes": sum(int(plan.decode_slots.size) for plan in spy.plans[seen:]),
                    "prompt_tokens": sum(int(plan.extend_lengths.sum()) for plan in spy.plans[seen:]),
                    "same_place": places == [pointers(array) for array in _arrays(pool)],
                    "old_deleted": all(array.is_deleted() for array in before),
                }
            )
        scheduler.check_integrity()
        runtime.check_integrity()
        ended = [outputs[request.request_id] for request in requests()]
        return {
            "stored_as": str(_arrays(pool)[0].dtype),
            "devices": len(_arrays(pool)[0].addressable_shards),
            "tp_rank": container.tp_rank(),
            "steps": steps,
            "calls": spy.calls,
            "plans": [digest(plan) for plan in spy.plans],
            "tokens": [output.token_ids for output in ended],
            "cached": [output.cached_tokens for output in ended],
            "logprobs": [output.logprobs for output in ended],
        }


def _arrays(pool: Any) -> list[jax.Array]:
    buffers = pool.take()
    pool.put(buffers)
    return jax.tree.leaves(buffers)


if __name__ == "__main__":
    print(json.dumps({f"{tp_size} {dtype}": run(tp_size, dtype) for tp_size in SIZES for dtype in DTYPES}))
