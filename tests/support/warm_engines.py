"""Run in a process of its own with several CPU devices: what serving compiles after everything was compiled. JSON."""

from __future__ import annotations

import json

from app.config.server_args import ServerArgs
from app.core.sampling import SamplingParams
from app.models.layers.attention_choice import AttentionKind
from app.providers.testing import Override, overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from tests.support.compiling import compiled_programs
from tests.support.flat_engines import MODEL, PROMPTS, chosen
from tests.support.tiny_llama import files_of

CHUNK = 16
ARGS = ServerArgs(
    tp_size=2, page_size=8, max_total_tokens=256, max_running_requests=2, device="cpu", chunked_prefill_size=CHUNK
)
SAMPLING = (
    SamplingParams(max_tokens=12, temperature=0.7, top_k=5),
    SamplingParams(max_tokens=12, logprobs=0),
    SamplingParams(max_tokens=12, temperature=0.7, logprobs=2, presence_penalty=0.5),
    SamplingParams(max_tokens=12, logit_bias={3: 1.0}),
)


def compiled_by_serving(**overrides: Override) -> list[str]:
    with overridden(ARGS, **files_of(MODEL, seed=1), **overrides) as container:
        list(container.runtime().warm_up("all", CHUNK))
        requests = [
            Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)
            for number, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLING, strict=True))
        ]
        with compiled_programs() as compiled:
            generate_all(container.scheduler(), requests)
        return compiled


def main() -> None:
    gather = compiled_by_serving(attention=chosen(AttentionKind.GATHER))
    print(json.dumps({"rows": compiled_by_serving(), "gather": gather}))


if __name__ == "__main__":
    main()
