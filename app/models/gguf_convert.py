"""A GGUF file -> the files of a Hugging Face folder.

Weights are dequantised to float32 and named as in Hugging Face; llama's query and key rows, which GGUF stores
interleaved, go back to the half-rotation order that the rest of the project computes with, and Gemma's norms, which
GGUF stores with their 1, lose it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from app.config.model_config import ModelConfig
from app.errors import ConfigError
from app.models.gguf_architectures import ARCHITECTURES, GgufArchitecture, shortest
from app.models.gguf_file import GgufFile
from app.models.gguf_metadata import GgufMetadata
from app.models.gguf_rope import FACTORS_TENSOR, scaling_from_factors, scaling_from_metadata
from app.models.gguf_tokenizer import build_tokenizer, end_token_ids, tokenizer_config
from app.models.hf_config import model_config_from_hf
from app.models.weight_files import INDEX_FILE, SINGLE_FILE

_SHARD_BYTES = 1 << 30  # what conversion keeps in memory at a time
_DEFAULT_ROPE_THETA = 10_000.0  # where a file has none

_TOP_LEVEL = {  # name in GGUF -> name in Hugging Face
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


class GgufModel:
    """A GGUF file of a supported architecture: everything about it that can be refused has been checked."""

    def __init__(self, path: Path) -> None:
        """Reads the header. Raises ConfigError for what is damaged or not supported, naming it."""
        self._path = path
        self._file = GgufFile(path)
        name = self._file.metadata.text("general.architecture")
        if name is None or name not in ARCHITECTURES:
            raise ConfigError(
                field="general.architecture",
                value=name,
                allowed=f"GGUF files can be read for {', '.join(ARCHITECTURES)}; use a Hugging Face folder for others",
            )
        self._architecture = ARCHITECTURES[name]
        self.config = _hf_config(self._file, name, self._architecture)
        self._shape = model_config_from_hf(self.config)
        self._sources = self._tensor_sources()
        self._require_shapes()

    @property
    def float32_bytes(self) -> int:
        """Bytes of all weights once they are float32."""
        return sum(4 * int(np.prod(self._file.tensors[source].shape)) for source in self._sources.values())

    def write(self, folder: Path, report: Callable[[str, float], None]) -> None:
        """Write the five files (more, when the weights need several) into the existing, empty `folder`.

        Memory: about 1 GiB of weights at a time. Raises OSError or SafetensorError when writing fails.
        """
        metadata = self._file.metadata
        build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", tokenizer_config(metadata))
        _write_json(folder / "generation_config.json", {"eos_token_id": self.config["eos_token_id"]})
        _write_json(folder / "config.json", self.config)
        self._write_weights(folder, report)

    def _write_weights(self, folder: Path, report: Callable[[str, float], None]) -> None:
        shards = self._shards()
        names = [SINGLE_FILE] if len(shards) == 1 else _shard_names(len(shards))
        done, total = 0, len(self._sources)
        for file_name, targets in zip(names, shards, strict=True):
            tensors = {}
            for target in targets:
                tensors[target] = self._tensor(target)
                done += 1
                report("converting weights", done / total)
            save_file(tensors, folder / file_name, metadata={"format": "pt"})
        if len(shards) > 1:
            weight_map = {target: name for name, targets in zip(names, shards, strict=True) for target in targets}
            _write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})

    def _shards(self) -> list[list[str]]:
        shards: list[list[str]] = [[]]
        filled = 0
        for target, source in self._sources.items():
            size = 4 * int(np.prod(self._file.tensors[source].shape))
            if shards[-1] and filled + size > _SHARD_BYTES:
                shards.append([])
                filled = 0
            shards[-1].append(target)
            filled += size
        return shards

    def _tensor(self, target: str) -> np.ndarray:
        source = self._sources[target]
        tensor = self._file.tensor(source)
        if self._architecture.interleaved_rope and source.endswith("attn_q.weight"):
            tensor = half_rotation_rows(tensor, self._shape.num_heads)
        if self._architecture.interleaved_rope and source.endswith("attn_k.weight"):
            tensor = half_rotation_rows(tensor, self._shape.num_kv_heads)
        if self._architecture.norm_offset and source.endswith("norm.weight"):
            tensor = tensor - np.float32(self._architecture.norm_offset)
        return np.ascontiguousarray(tensor, dtype=np.float32)

    def _tensor_sources(self) -> dict[str, str]:
        """Name in Hugging Face -> name in GGUF. Raises ConfigError for a tensor too few or too many."""
        per_layer = self._architecture.layer_names
        if self._shape.num_layers > len(self._file.tensors):
            # Here, because a damaged header may state billions, whose names alone would fill the memory.
            raise ConfigError(
                field="block_count",
                value=self._shape.num_layers,
                allowed=f"at most {len(self._file.tensors)} in {self._path}, which has so many tensors",
            )
        expected = {_TOP_LEVEL[name]: name for name in _TOP_LEVEL}
        for layer in range(self._shape.num_layers):
            expected.update({f"model.layers.{layer}.{per_layer[name]}": f"blk.{layer}.{name}" for name in per_layer})
        if self._shape.tie_word_embeddings:
            del expected["lm_head.weight"]
        missing = sorted(set(expected.values()) - self._file.tensors.keys())
        unknown = sorted(self._file.tensors.keys() - set(expected.values()) - {FACTORS_TENSOR})
        if missing or unknown:
            raise ConfigError(
                field="model_path",
                value=str(self._path),
                allowed=f"does not have the tensors of its architecture: missing {missing[:4]}, unknown {unknown[:4]}",
            )
        return expected

    def _require_shapes(self) -> None:
        shapes = _shapes(self._shape)
        for name in self._sources.values():
            shape = self._file.tensors[name].shape
            expected = shapes[name.split(".", 2)[2] if name.startswith("blk.") else name]
            if shape != expected:
                raise ConfigError(field=name, value=shape, allowed=f"the shape its metadata ask for: {expected}")


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of every tensor, by its name in GGUF without the number of the layer."""
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "token_embd.weight": (config.vocab_size, width),
        "output_norm.weight": (width,),
        "output.weight": (config.vocab_size, width),
        "attn_norm.weight": (width,),
        "attn_q.weight": (queries, width),
        "attn_k.weight": (keys, width),
        "attn_v.weight": (keys, width),
        "attn_output.weight": (width, queries),
        "attn_q.bias": (queries,),
        "attn_k.bias": (keys,),
        "attn_v.bias": (keys,),
        "attn_q_norm.weight": (config.head_dim,),
        "attn_k_norm.weight": (config.head_dim,),
        "post_attention_norm.weight": (width,),
        "ffn_norm.weight": (width,),
        "post_ffw_norm.weight": (width,),
        "ffn_gate.weight": (inner, width),
        "ffn_up.weight": (inner, width),
        "ffn_down.weight": (width, inner),
    }


def half_rotation_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """(num_heads * head_dim, width) with rotary pairs in rows 2i, 2i + 1 of a head -> in rows i, i + head_dim / 2."""
    rows, width = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _hf_config(file: GgufFile, name: str, architecture: GgufArchitecture) -> dict[str, Any]:
    metadata = file.metadata
    _refuse_variants(metadata, name)
    embedding = file.tensors.get("token_embd.weight")
    theta = shortest(metadata.number(f"{name}.rope.freq_base"))
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": None if embedding is None else embedding.shape[0],
        "hidden_size": metadata.whole(f"{name}.embedding_length"),
        "intermediate_size": metadata.whole(f"{name}.feed_forward_length"),
        "num_hidden_layers": metadata.whole(f"{name}.block_count"),
        "num_attention_heads": metadata.whole(f"{name}.attention.head_count"),
        "num_key_value_heads": metadata.whole(f"{name}.attention.head_count_kv"),
        "head_dim": metadata.whole(f"{name}.attention.key_length") or metadata.whole(f"{name}.rope.dimension_count"),
        "max_position_embeddings": metadata.whole(f"{name}.context_length"),
        "rms_norm_eps": shortest(metadata.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, name, theta),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.whole("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_token_ids(metadata),
        "torch_dtype": "float32",
        **architecture.own_config(metadata),
    }


def _refuse_variants(metadata: GgufMetadata, name: str) -> None:
    """Things that the architecture's name covers and that cannot be served."""
    experts = metadata.whole(f"{name}.expert_count")
    if experts:
        raise ConfigError(field=f"{name}.expert_count", value=experts, allowed="models without experts")
    if not metadata.texts("tokenizer.ggml.tokens"):
        raise ConfigError(field="tokenizer.ggml.tokens", value=None, allowed="a GGUF file that has its tokenizer")


def _rope_scaling(file: GgufFile, name: str, theta: float | None) -> dict[str, Any] | None:
    if FACTORS_TENSOR in file.tensors:
        return scaling_from_factors(file.tensor(FACTORS_TENSOR), _DEFAULT_ROPE_THETA if theta is None else theta)
    return scaling_from_metadata(file.metadata, name)


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
