"""Run in a process of its own with 8 CPU devices: one engine by every driver, attention and size. Prints answers."""

from __future__ import annotations

import json

import numpy as np
from dependency_injector import providers

from app.config.server_args import ServerArgs
from app.containers import Container
from app.core.ports import PoolSpec
from app.core.sampling import SamplingParams
from app.models.flat_programs import FlatPrograms
from app.models.flat_runner import FlatModelRunner
from app.models.layer_runs import LayersInARow
from app.models.layers.attention_choice import AttentionChoice, AttentionKind
from app.models.layers.ragged_attention import RaggedAttention
from app.providers.testing import Override, overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from app.tpu.mesh import TENSOR_AXIS
from tests.support.ragged_reference import ragged_reference
from tests.support.tiny_llama import files_of, tiny_llama

MODEL = tiny_llama(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_heads=8, num_kv_heads=2, context_length=128, qk_norm=True
)
RNG = np.random.default_rng(0)
SHARED = RNG.integers(0, 64, 40).astype(np.int32)
PROMPTS = [np.concatenate([SHARED[: 10 * n], RNG.integers(0, 64, 5).astype(np.int32)]) for n in range(1, 5)]


def chosen(kind: AttentionKind, **padding: int) -> Override:
    return lambda _: providers.Object(AttentionChoice(kind=kind, reason="a test wants it", **padding))


def _reference_runner(container: Container) -> providers.Provider[object]:
    """The runner of the ragged kernel, with the kernel's contract instead of the kernel, which only a TPU runs."""

    def build(spec: PoolSpec) -> FlatModelRunner:
        mesh = container.mesh()
        attention = RaggedAttention(spec, mesh.shape[TENSOR_AXIS], ragged_reference)
        config = container.model_config()
        return FlatModelRunner(
            config, container.checkpoint(), FlatPrograms(config, mesh, spec, attention, LayersInARow(), "float32")
        )

    return providers.ThreadSafeSingleton(build, container.pool_spec)


def _answers(tp_size: int, **overrides: Override) -> list[list[int]]:
    args = ServerArgs(
        tp_size=tp_size,
        page_size=8,
        max_total_tokens=256,
        max_running_requests=4,
        device="cpu",
        chunked_prefill_size=16,
        check_invariants=True,
    )
    with overridden(args, **files_of(MODEL, seed=1), **overrides) as container:
        requests = [
            Request(
                request_id=str(n),
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=12, temperature=0.0 if n % 2 else 0.7, seed=n),
            )
            for n, prompt in enumerate(PROMPTS)
        ]
        return [list(output.token_ids) for output in generate_all(container.scheduler(), requests)]


def main() -> None:
    gather = {"attention": chosen(AttentionKind.GATHER)}
    ragged = {"attention": chosen(AttentionKind.RAGGED), "model_runner": _reference_runner}
    padded = {**ragged, "attention": chosen(AttentionKind.RAGGED, extra_kv_heads=2, extra_head_dim=8)}
    answers = {
        "rows": _answers(1),
        "gather": _answers(1, **gather),
        "gather on 8": _answers(8, **gather),
        "ragged": _answers(1, **ragged),
        "ragged on 8": _answers(8, **ragged),
        "ragged, padded, on 2": _answers(2, **padded),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
