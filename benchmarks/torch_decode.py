"""The same decode steps and prefill in torch and transformers, for a ratio measured in the same hour.

In an environment of its own (torch for CPU, transformers), on the converted model that `make demo` leaves in the
per-user cache:

    python benchmarks/torch_decode.py ~/.cache/tpukv/models/DIGEST
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from transformers import LlamaForCausalLM

CONTEXT_TOKENS, PREFILL_TOKENS, STEPS = 215, 512, 12


def least_ms(call: Callable[[], object], count: int) -> float:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return 1e3 * min(times)


@torch.inference_mode()
def main(folder: str) -> None:
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for batch in (1, 4, 16):
        state = model(torch.randint(0, 40_000, (batch, CONTEXT_TOKENS)), use_cache=True)

        def step() -> None:
            nonlocal state
            token = state.logits[:, -1].argmax(-1, keepdim=True)
            state = model(token, past_key_values=state.past_key_values, use_cache=True)

        print(f"decode batch {batch:>2}: {least_ms(step, STEPS):6.1f} ms", flush=True)
    prompt = torch.randint(0, 40_000, (1, PREFILL_TOKENS))
    took = least_ms(lambda: model(prompt, use_cache=True, logits_to_keep=1), 3)
    print(f"prefill of {PREFILL_TOKENS}: {1e3 * PREFILL_TOKENS / took:.0f} tokens/s")


if __name__ == "__main__":
    main(sys.argv[1])
