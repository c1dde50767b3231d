"""Swapping one provider: the real model on a device pool that enforces donation.

python examples/fake_device_pool.py
"""

import numpy as np
from dependency_injector import providers

from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.models.random_weights import RandomWeights
from app.providers.testing import fake_device_pool, fake_model, overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request

SMALL_LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=257,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    context_length=256,
)


def main() -> list[list[int]]:
    """Serve two prompts; -> their output tokens."""
    files = fake_model(SMALL_LLAMA)
    with overridden(
        ServerArgs(page_size=4, max_total_tokens=512),
        device_pool=fake_device_pool,
        base_model_config=files["base_model_config"],
        checkpoint=lambda _: providers.Object(RandomWeights(SMALL_LLAMA, seed=0)),
        tokenizer=files["tokenizer"],
        detokenizer=files["detokenizer"],
    ) as container:
        print("device pool:", type(container.device_pool()).__name__)
        prompts = [np.arange(1, 30, dtype=np.int32), np.arange(1, 25, dtype=np.int32)]
        requests = [Request(request_id=f"r{number}", prompt_token_ids=prompt) for number, prompt in enumerate(prompts)]
        outputs = generate_all(container.scheduler(), requests)
        container.scheduler().check_integrity()
    for output in outputs:
        print(output.request_id, "cached", output.cached_tokens, "tokens", output.token_ids[:8], "...")
    return [output.token_ids for output in outputs]


if __name__ == "__main__":
    main()
