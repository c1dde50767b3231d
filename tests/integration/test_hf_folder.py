"""A Hugging Face folder (config.json, safetensors) is served with the tokens of the same weights held in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.core.sampling import SamplingParams
from app.models.random_weights import RandomWeights
from app.models.weight_files import SINGLE_FILE
from app.providers.report import engine_facts
from app.providers.testing import Override, fake_model, overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from tests.support.golden_models import golden_model
from tests.support.seeded_weights import seeded_weight
from tests.support.tiny_llama import files_of, tiny_llama

FAMILIES = {
    "llama": tiny_llama(),
    "qwen2": tiny_llama(architecture="qwen2", attention_bias=True),
    "qwen3": tiny_llama(architecture="qwen3", qk_norm=True, tie_word_embeddings=True),
}


def write_folder(folder: Path, model: ModelConfig) -> None:
    source = RandomWeights(model, seed=0)
    tensors = {name: np.ascontiguousarray(source.tensor(name)) for name in source.names}
    save_file(tensors, folder / "model.safetensors")
    config: dict[str, Any] = {
        "model_type": model.architecture,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context_length,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope_theta,
        "tie_word_embeddings": model.tie_word_embeddings,
    }
    (folder / "config.json").write_text(json.dumps(config))


def serve(args: ServerArgs, overrides: dict[str, Override]) -> list[list[int]]:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [np.arange(1, end, dtype=np.int32) for end in (30, 22)]
    with overridden(args, **overrides) as container:
        requests = [
            Request(request_id=str(number), prompt_token_ids=prompt, sampling=params)
            for number, prompt in enumerate(prompts)
        ]
        outputs = generate_all(container.scheduler(), requests)
        container.scheduler().check_integrity()
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_tokens_of_its_weights(tmp_path: Path, family: str) -> None:
    # given
    model = FAMILIES[family]
    write_folder(tmp_path, model)
    in_memory = files_of(model)
    sizes = {"page_size": 4, "max_total_tokens": 256}

    # when: only the tokenizer is swapped, which these folders do not have
    found = serve(
        ServerArgs(model_path=str(tmp_path), **sizes),
        {name: in_memory[name] for name in ("tokenizer", "detokenizer")},
    )

    # then
    assert found == serve(ServerArgs(**sizes), in_memory)
    assert len({tuple(tokens) for tokens in found}) == 2


@pytest.mark.parametrize("family", ["gemma3_text", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_folder_of_a_hybrid_model_gives_the_tokens_that_transformers_gives(tmp_path: Path, family: str) -> None:
    # given
    golden = golden_model(family)
    save_file({name: seeded_weight(name, shape) for name, shape in golden.shapes.items()}, tmp_path / SINGLE_FILE)
    (tmp_path / "config.json").write_text(json.dumps(golden.hf_config))
    fakes = fake_model(golden.config)
    args = ServerArgs(
        model_path=str(tmp_path), page_size=4, max_total_tokens=512, chunked_prefill_size=24, recurrent_track_interval=8
    )
    lengths = (40, 41, 57, 40)

    # when
    with overridden(args, **{name: fakes[name] for name in ("tokenizer", "detokenizer")}) as container:
        told = engine_facts(container)
        outputs = [
            generate_all(
                container.scheduler(),
                [
                    Request(
                        request_id=str(number),
                        prompt_token_ids=golden.sequences[0][:length],
                        sampling=SamplingParams(max_tokens=1, ignore_eos=True),
                    )
                ],
            )[0]
            for number, length in enumerate(lengths)
        ]

    # then
    assert [output.token_ids for output in outputs] == [[golden.logits[0][length - 1].argmax()] for length in lengths]
    assert [output.cached_tokens > 0 for output in outputs] == [False, True, True, True]
    assert told["cache_type"] == "unified_radix_cache"
    assert told["window_pool_bytes" if family == "gemma3_text" else "state_pool_bytes"] > 0
