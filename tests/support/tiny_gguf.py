"""A GGUF file of some kilobytes: a two-layer model with random weights and a byte-level tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType as Quantization
from tokenizers import pre_tokenizers

from app.models.checkpoint import Checkpoint, open_checkpoint

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN = 2, 32, 4, 2, 8, 64
TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "<|im_start|>", "<|im_end|>", "<own>"]
TYPES = [1] * (len(TOKENS) - 3) + [3, 3, 4]
START, END = TOKENS.index("<|im_start|>"), TOKENS.index("<|im_end|>")
MERGES = ["h e", "l l", "he ll"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"

Edit = Callable[[gguf.GGUFWriter, dict[str, np.ndarray]], None]


def hf_weights(*, extras: dict[str, tuple[int, ...]] | None = None) -> dict[str, np.ndarray]:
    """Random weights under their Hugging Face names, as a converter would find them."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (len(TOKENS), WIDTH),
        "model.norm.weight": (WIDTH,),
    }
    for layer in range(LAYERS):
        own = {
            "input_layernorm.weight": (WIDTH,),
            "post_attention_layernorm.weight": (WIDTH,),
            "self_attn.q_proj.weight": (HEADS * HEAD_DIM, WIDTH),
            "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.o_proj.weight": (WIDTH, HEADS * HEAD_DIM),
            "mlp.gate_proj.weight": (FFN, WIDTH),
            "mlp.up_proj.weight": (FFN, WIDTH),
            "mlp.down_proj.weight": (WIDTH, FFN),
            **(extras or {}),
        }
        shapes.update({f"model.layers.{layer}.{name}": shape for name, shape in own.items()})
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
}


def gguf_name(name: str) -> str:
    parts = name.split(".")
    block = f"blk.{parts[2]}." if parts[1] == "layers" else ""
    return f"{block}{GGUF_NAMES[parts[-2]]}.{parts[-1]}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to query and key rows: rotary pairs next to one another."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def write_gguf(
    path: Path,
    weights: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    edit: Edit = lambda writer, tensors: None,
) -> Path:
    """A small GGUF file with a tokenizer. `edit` may add metadata and change tensors before they are written."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(START)
    writer.add_eos_token_id(END)
    writer.add_chat_template(TEMPLATE)
    tensors = {gguf_name(name): weight for name, weight in weights.items()}
    if architecture == "llama":
        for name in tensors:
            if name.endswith("attn_q.weight"):
                tensors[name] = interleaved(tensors[name], HEADS)
            if name.endswith("attn_k.weight"):
                tensors[name] = interleaved(tensors[name], KV_HEADS)
    edit(writer, tensors)
    for name, tensor in tensors.items():
        if "ffn_up" in name:
            writer.add_tensor(name, gguf.quants.quantize(tensor, Quantization.Q8_0), raw_dtype=Quantization.Q8_0)
        else:
            writer.add_tensor(name, tensor.astype(np.float16) if "ffn_gate" in name else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(path: Path, cache: Path) -> Checkpoint:
    return open_checkpoint(str(path), cache_dir=cache)


def model_folders(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if path.is_dir())
