"""The families of models: how each one's config.json is read, and what decoder it describes.

| model_type | layers | what is its own |
|---|---|---|
| llama | full | |
| mistral | windows, if shorter than the context | |
| qwen2 | full; windows in late layers, if switched on | biases |
| qwen3 | as qwen2 | norms of heads |
| qwen3_moe | full | norms of heads, experts |
| gemma2 | window, full, window, ... | norms on both sides, soft caps |
| gemma3_text | five windows, then full | norms on both sides and of heads, two ropes |
| gpt_oss | window, full, window, ... | sinks, biases, experts |
| deepseek_v3 | full | latents for keys and values, experts in groups, shared experts |
| qwen3_next | gated delta net or full | a gate on attention, experts, a shared expert |
| falcon_h1 | state space and full in each | constants in many places |
| jamba | recurrent and full | no decoder: read as far as memory is concerned |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from app.config.model_config import ModelConfig
from app.errors import ConfigError
from app.models.decoder import Decoder
from app.models.families import gemma, llama_like, recurrent
from app.models.families.deepseek import deepseek_v3, latent_transformer
from app.models.families.falcon_h1 import attention_beside_state_space, falcon_h1
from app.models.families.fields import Fields
from app.models.families.gpt_oss import gpt_oss
from app.models.families.qwen3_next import delta_and_attention, qwen3_next
from app.models.families.transformer import transformer


class Family(NamedTuple):
    """read: ConfigError for what cannot be served. decoder: None where there is none."""

    read: Callable[[Fields], ModelConfig]
    decoder: Callable[[ModelConfig], Decoder] | None


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(llama_like.llama, transformer),
        "mistral": Family(llama_like.mistral, transformer),
        "qwen2": Family(llama_like.qwen2, transformer),
        "qwen3": Family(llama_like.qwen3, transformer),
        "qwen3_moe": Family(llama_like.qwen3_moe, transformer),
        "gemma2": Family(gemma.gemma2, transformer),
        "gemma3_text": Family(gemma.gemma3_text, transformer),
        "gpt_oss": Family(gpt_oss, transformer),
        "deepseek_v3": Family(deepseek_v3, latent_transformer),
        "qwen3_next": Family(qwen3_next, delta_and_attention),
        "falcon_h1": Family(falcon_h1, attention_beside_state_space),
        "jamba": Family(recurrent.unserved, None),
    }
)


def decoder_of(config: ModelConfig) -> Decoder:
    """Raises ConfigError for a family that has none."""
    make = _MAKERS.get(config.architecture)
    if make is None:
        allowed = f"families with a model runner: {', '.join(_MAKERS)}"
        raise ConfigError(field="model", value=config.architecture, allowed=allowed)
    return make(config)


def num_parameters(config: ModelConfig) -> int:
    """Elements of all weights, exactly; 0 for a family without a decoder, whose weights nobody loads."""
    return decoder_of(config).num_parameters if config.architecture in _MAKERS else 0


def weight_bytes(config: ModelConfig, dtype: str) -> int:
    """Of all weights, over all ranks, some of which keep another dtype; 0 as `num_parameters`."""
    return decoder_of(config).weight_bytes(dtype) if config.architecture in _MAKERS else 0


_MAKERS = {name: family.decoder for name, family in FAMILIES.items() if family.decoder is not None}
