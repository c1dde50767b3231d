"""gemma3 as a GGUF file, against the golden logits that an independent implementation computed for the same weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from app.config.model_config import Component, RopeScaling
from app.errors import ConfigError
from app.models.checkpoint import Checkpoint, open_checkpoint
from app.models.gguf_metadata import GgufMetadata
from app.models.gguf_sentencepiece import sentencepiece_tokenizer
from app.text.tokenizer import load_tokenizer
from app.tpu.mesh import make_mesh
from tests.support.golden_models import golden_model
from tests.support.hybrid_rig import HybridRows, hybrid_spec, open_hybrid
from tests.support.tiny_gguf import GGUF_NAMES

GOLDEN = golden_model("gemma3_text")
CONFIG = GOLDEN.hf_config
FEW_NAMES = {
    **GGUF_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
BYTES = [f"<0x{byte:02X}>" for byte in range(96)]
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
WORDS = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "bcb"]
TOKENS = [*SPECIAL, *BYTES, *WORDS, "\n\n", *(f"<unused{number}>" for number in range(18))]
TYPES = [3] * 4 + [6] * 96 + [1] * len(WORDS) + [4] + [3] * 18
# Among the words, "bc" is joined before "ab".
SCORES = [0.0] * 100 + [-90.0, -90.0, -90.0, -90.0, -3.0, -1.0, -5.0, -4.0, -2.0] + [-1000.0] * 19


def tensors() -> dict[str, np.ndarray]:
    """As llama.cpp's converter writes them: norms with their 1.

    A GGUF file does not state by how much scores are scaled: a head's width says it. The golden model has another
    scale; its queries' norms take up the difference here.
    """
    scale = np.float32((CONFIG["head_dim"] / CONFIG["query_pre_attn_scalar"]) ** 0.5)
    found = {}
    for name in GOLDEN.shapes:
        parts = name.split(".")
        weight = GOLDEN.source().tensor(name).astype(np.float32)
        if parts[-2].endswith("norm"):
            weight = (weight + np.float32(1)) * (scale if parts[-2] == "q_norm" else np.float32(1))
        block = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        found[f"{block}{FEW_NAMES[parts[-2]]}.weight"] = weight
    return found


def write(path: Path, *, tokens: int = len(TOKENS), scores: int = len(TOKENS)) -> Path:
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_key_length(CONFIG["head_dim"])
    writer.add_value_length(CONFIG["head_dim"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(8.0)
    writer.add_sliding_window(CONFIG["sliding_window"])
    writer.add_uint32("gemma3.attention.sliding_window_pattern", CONFIG["sliding_window_pattern"])
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(TOKENS[:tokens])
    writer.add_token_scores(SCORES[:scores])
    writer.add_token_types(TYPES[:tokens])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_space_prefix(False)
    for name, tensor in tensors().items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("gemma3")
    return open_checkpoint(str(write(folder / "gemma3.gguf")), cache_dir=folder / "cache")


def test_windows_and_both_ropes_come_from_the_metadata(checkpoint: Checkpoint) -> None:
    config = checkpoint.model_config

    assert config.layer_components == GOLDEN.config.layer_components
    assert (config.sliding_window, config.components) == (20, {Component.SWA, Component.FULL})
    assert (config.rope_theta, config.window_rope_theta) == (1_000_000.0, 10_000.0)
    assert config.rope_scaling == RopeScaling(kind="linear", factor=8.0)
    assert (config.norm_offset, config.attention_scale) == (1.0, 16**-0.5)
    assert config.tie_word_embeddings


def test_weights_come_back_as_they_were(checkpoint: Checkpoint) -> None:
    assert set(checkpoint.weight_names()) == set(GOLDEN.shapes)
    for name in GOLDEN.shapes:
        if not name.endswith("q_norm.weight"):
            expected = GOLDEN.source().tensor(name)
            np.testing.assert_allclose(checkpoint.tensor(name), expected, rtol=0, atol=1e-6, err_msg=name)


def test_its_logits_are_the_golden_ones_beyond_the_window(checkpoint: Checkpoint) -> None:
    config, tokens = checkpoint.model_config, GOLDEN.sequences[0]
    spec = hybrid_spec(config, page_size=16, num_pages=6)
    rows = HybridRows(open_hybrid(config, checkpoint, spec), config, spec, make_mesh(1, "cpu"), num_rows=1, num_pages=6)

    chunks = [rows.extend([0], [tokens[start : start + 30]], [start], num_tokens=32) for start in (0, 30)]
    decoded = rows.decode([0], [int(tokens[60])], [61])

    greatest = np.abs(GOLDEN.logits[0]).max()
    expected = GOLDEN.logits[0][[29, 59, 60]]
    assert np.abs(np.concatenate([*chunks, decoded]) - expected).max() <= 2e-5 * greatest  # float32


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abc", ["a", "bc"]),  # not "ab", though it comes first
        ("ab a", ["ab", "▁a"]),
        ("abcb", ["a", "bcb"]),
        (" ab", ["▁ab"]),
        ("a\n\nb", ["a", "\n\n", "b"]),
        ("!<eos>", ["<0x21>", "<eos>"]),
    ],
)
def test_text_is_cut_by_scores_and_unknown_characters_into_bytes(
    checkpoint: Checkpoint, text: str, tokens: list[str]
) -> None:
    tokenizer = load_tokenizer(checkpoint.folder)

    ids = tokenizer.encode(text)

    assert [TOKENS[token_id] for token_id in ids] == tokens
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_lists_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.scores='100 values'.*128 tokens"):
        open_checkpoint(str(write(tmp_path / "m.gguf", scores=100)), cache_dir=tmp_path / "cache")


def test_a_text_begins_with_a_space_where_the_file_does_not_say_otherwise() -> None:
    values = {"tokens": TOKENS, "token_type": TYPES, "scores": SCORES, "unknown_token_id": 3}
    tokenizer = sentencepiece_tokenizer(
        GgufMetadata({f"tokenizer.ggml.{name}": value for name, value in values.items()})
    )

    encoding = tokenizer.encode("ab a")

    assert encoding.tokens == ["▁ab", "▁a"]
    assert tokenizer.decode(encoding.ids) == "ab a"
