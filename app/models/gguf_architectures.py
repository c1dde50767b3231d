"""The architectures whose GGUF files can be converted, and what differs between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from app.models.gguf_metadata import GgufMetadata

_PER_LAYER = {  # after "blk.N." -> after "model.layers.N."
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIAS = {f"attn_{part}.bias": f"self_attn.{part}_proj.bias" for part in "qkv"}
_QK_NORM = {f"attn_{part}_norm.weight": f"self_attn.{part}_norm.weight" for part in "qk"}
_NORMS_AROUND = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}

# A file does not say how Gemma scales scores. The largest model, known by its layers, goes by the width of the hidden
# state divided by the heads, all others by the width of a head.
_GEMMA3_27B_LAYERS = 62


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """How the files of one architecture differ from those of the others."""

    class_name: str
    model_type: str  # of config.json
    layer_names: Mapping[str, str]  # after "blk.N." -> after "model.layers.N."
    interleaved_rope: bool = False  # query and key rows need un-permuting
    norm_offset: float = 0.0  # what the weights of norms are greater by than in Hugging Face
    own_config: Callable[[GgufMetadata], dict[str, Any]] = lambda _: {}  # fields of config.json that others lack


def shortest(value: float | None) -> float | None:
    """The decimal that was meant: 1e-05, where float32 widened to float64 reads 9.999999747378752e-06."""
    return None if value is None else float(str(np.float32(value)))


def _gemma3(metadata: GgufMetadata) -> dict[str, Any]:
    head_dim = metadata.whole("gemma3.attention.key_length")
    width, heads = metadata.whole("gemma3.embedding_length"), metadata.whole("gemma3.attention.head_count")
    by_heads = metadata.whole("gemma3.block_count") == _GEMMA3_27B_LAYERS and width and heads
    return {
        "query_pre_attn_scalar": width // heads if width and heads and by_heads else head_dim,
        "sliding_window": metadata.whole("gemma3.attention.sliding_window"),
        "sliding_window_pattern": metadata.whole("gemma3.attention.sliding_window_pattern"),
        "rope_local_base_freq": shortest(metadata.number("gemma3.rope.freq_base_swa")),
        "final_logit_softcapping": shortest(metadata.number("gemma3.final_logit_softcapping")),
    }


ARCHITECTURES: Mapping[str, GgufArchitecture] = MappingProxyType(
    {
        "llama": GgufArchitecture(
            class_name="LlamaForCausalLM", model_type="llama", layer_names=_PER_LAYER, interleaved_rope=True
        ),
        "qwen2": GgufArchitecture(
            class_name="Qwen2ForCausalLM", model_type="qwen2", layer_names={**_PER_LAYER, **_QKV_BIAS}
        ),
        "qwen3": GgufArchitecture(
            class_name="Qwen3ForCausalLM", model_type="qwen3", layer_names={**_PER_LAYER, **_QK_NORM}
        ),
        "gemma3": GgufArchitecture(
            class_name="Gemma3ForCausalLM",
            model_type="gemma3_text",
            layer_names={**_PER_LAYER, **_QK_NORM, **_NORMS_AROUND},
            norm_offset=1.0,
            own_config=_gemma3,
        ),
    }
)
