from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config.model_config import Component, RopeScaling
from app.errors import ConfigError
from app.models.bundled import find_bundled_model
from app.models.checkpoint import open_checkpoint
from app.models.families.table import num_parameters
from app.models.gguf_convert import GgufModel, half_rotation_rows
from app.models.gguf_file import GgufFile
from app.text.tokenizer import load_tokenizer
from tests.support.tiny_gguf import (
    END,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    START,
    TOKENS,
    WIDTH,
    Edit,
    converted,
    hf_weights,
    interleaved,
    model_folders,
    write_gguf,
)

HEADER_BYTES = 5_600  # of the small file written below
LENGTHS = [struct.pack("<Q", length) for length in (0, 1 << 40, (1 << 63) - 1, 1 << 63)]


def test_weights_come_back_as_they_were(model: Path, weights: dict[str, np.ndarray], cache: Path) -> None:
    checkpoint = converted(model, cache)

    assert checkpoint.weight_names() == tuple(sorted(weights))
    for name, expected in weights.items():
        tolerance = {"up_proj": 0.02, "gate_proj": 2e-3}.get(name.split(".")[-2], 0.0)  # stored as Q8_0 and F16
        np.testing.assert_allclose(checkpoint.tensor(name), expected, atol=tolerance, rtol=0)


def test_configuration_tokenizer_and_digest_come_with_them(model: Path, cache: Path) -> None:
    checkpoint = converted(model, cache)
    config, tokenizer = checkpoint.model_config, load_tokenizer(checkpoint.folder)

    assert (config.architecture, config.num_layers, config.hidden_size, config.head_dim) == ("llama", 2, 32, 8)
    assert (config.vocab_size, config.context_length, config.rope_theta) == (len(TOKENS), 128, 50_000.0)
    assert config.rms_norm_eps == 1e-5  # not the float32 nearest to it, widened
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids, tokenizer.eos_token_ids) == (START, (END,), (END,))
    assert config.components == {Component.FULL}
    assert checkpoint.digest == hashlib.sha256(model.read_bytes()).hexdigest()
    assert checkpoint.folder == cache / "models" / checkpoint.digest

    prompt = tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": "hell 12<own>"}]))
    assert [TOKENS[token_id] for token_id in prompt] == [
        *("<|im_start|>", *"us", "e", "r", "Ċ", "hell", "Ġ", "1", "2", "<own>", "<|im_end|>"),
    ]
    assert tokenizer.decode(prompt) == "user\nhell 12<own>"


def test_an_output_matrix_of_its_own_unties_the_embedding(
    tmp_path: Path, weights: dict[str, np.ndarray], cache: Path
) -> None:
    head = np.ones((len(TOKENS), WIDTH), np.float32)
    path = write_gguf(tmp_path / "m.gguf", weights, edit=lambda _, tensors: tensors.update({"output.weight": head}))

    checkpoint = converted(path, cache)

    assert not checkpoint.model_config.tie_word_embeddings
    np.testing.assert_array_equal(checkpoint.tensor("lm_head.weight"), head)


@pytest.mark.parametrize(
    ("architecture", "extras"),
    [
        (
            "qwen2",
            {
                f"self_attn.{part}_proj.bias": (heads * HEAD_DIM,)
                for part, heads in [("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)]
            },
        ),
        ("qwen3", {f"self_attn.{part}_norm.weight": (HEAD_DIM,) for part in "qk"}),
    ],
)
def test_qwen_files_keep_the_order_of_their_rows(
    tmp_path: Path, cache: Path, architecture: str, extras: dict[str, tuple[int, ...]]
) -> None:
    weights = hf_weights(extras=extras)
    path = write_gguf(tmp_path / "qwen.gguf", weights, architecture=architecture)

    checkpoint = converted(path, cache)

    assert checkpoint.model_config.architecture == architecture
    assert checkpoint.weight_names() == tuple(sorted(weights))
    for name in ["self_attn.q_proj.weight", "self_attn.k_proj.weight", *extras]:
        np.testing.assert_array_equal(checkpoint.tensor(f"model.layers.1.{name}"), weights[f"model.layers.1.{name}"])


def test_half_rotation_rows_undoes_interleaving_head_by_head() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of width 4

    assert interleaved(rows, 2).ravel().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert half_rotation_rows(interleaved(rows, 2), 2).ravel().tolist() == rows.ravel().tolist()


def test_large_weights_are_written_in_several_files(
    model: Path, weights: dict[str, np.ndarray], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.models.gguf_convert._SHARD_BYTES", 20_000)

    checkpoint = converted(model, cache)

    assert len(list(checkpoint.folder.glob("model-*.safetensors"))) > 2
    assert checkpoint.weight_names() == tuple(sorted(weights))
    np.testing.assert_array_equal(checkpoint.tensor("model.norm.weight"), weights["model.norm.weight"])


def llama3_factors(factor: float) -> np.ndarray:
    """As the published code of Llama 3.1 divides frequencies, written as a loop over them."""
    factors = []
    for index in range(HEAD_DIM // 2):
        wavelength = 2 * np.pi * 50_000.0 ** (2 * index / HEAD_DIM)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_scaling_is_found_in_its_divisors(tmp_path: Path, weights: dict[str, np.ndarray], cache: Path) -> None:
    divisors = {"rope_freqs.weight": llama3_factors(32.0)}
    path = write_gguf(tmp_path / "m.gguf", weights, edit=lambda _, tensors: tensors.update(divisors))

    scaling = converted(path, cache).model_config.rope_scaling

    assert scaling == RopeScaling(kind="llama3", factor=32.0)


def add_text(key: str, value: str) -> Edit:
    return lambda writer, _: writer.add_string(key, value)


def replace_text(key: str, value: str) -> Edit:
    def edit(writer: gguf.GGUFWriter, _: dict[str, np.ndarray]) -> None:
        writer.kv_data[0].pop(key)
        writer.add_string(key, value)

    return edit


def with_tensor(name: str, tensor: np.ndarray) -> Edit:
    return lambda _, tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (replace_text("tokenizer.ggml.pre", "deepseek-llm"), "tokenizer.ggml.pre='deepseek-llm'"),
        (replace_text("tokenizer.ggml.model", "bert"), "tokenizer.ggml.model='bert'"),
        (replace_text("tokenizer.ggml.model", "llama"), "tokenizer.ggml.scores='0 values'"),
        (replace_text("tokenizer.ggml.tokens", "not a list"), "tokenizer.ggml.tokens"),
        (replace_text("llama.block_count", "two"), "llama.block_count"),
        (add_text("llama.rope.scaling.type", "yarn"), "rope_scaling"),
        (lambda writer, _: writer.add_expert_count(8), "llama.expert_count=8"),
        (lambda writer, _: writer.kv_data[0].pop("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"),
        (lambda writer, _: writer.kv_data[0].pop("llama.embedding_length"), "hidden_size"),
        (with_tensor("rope_freqs.weight", np.full(4, 3.0, np.float32)), "rope_freqs.weight"),
        (with_tensor("blk.0.surprise.weight", np.ones(4, np.float32)), "blk.0.surprise.weight"),
        (lambda _, tensors: tensors.pop("blk.1.attn_k.weight"), "blk.1.attn_k.weight"),
        (with_tensor("blk.0.attn_q.weight", np.ones((8, WIDTH), np.float32)), "blk.0.attn_q.weight=(8, 32)"),
        (with_tensor("output_norm.weight", np.ones(WIDTH, np.int8)), "I8"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, weights: dict[str, np.ndarray], cache: Path, edit: Edit, named: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights, edit=edit)

    with pytest.raises(ConfigError) as caught:
        converted(path, cache)

    assert named in str(caught.value)
    assert model_folders(cache) == []


def test_another_architecture_is_refused_by_name(tmp_path: Path, cache: Path, weights: dict[str, np.ndarray]) -> None:
    path = write_gguf(tmp_path / "m.gguf", weights, architecture="mamba")

    with pytest.raises(ConfigError, match=r"general\.architecture='mamba'.*llama, qwen2, qwen3, gemma3"):
        converted(path, cache)


def test_a_file_cut_anywhere_is_refused(model: Path) -> None:
    whole = model.read_bytes()
    for kept in [*range(4, HEADER_BYTES, 53), *range(HEADER_BYTES, len(whole) - 32, 4_001), len(whole) - 33]:
        model.write_bytes(whole[:kept])
        with pytest.raises(ConfigError, match=r"tiny\.gguf"):
            GgufModel(model)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that the examples of one test overwrite in turn."""
    return write_gguf(tmp_path_factory.mktemp("damaged") / "scratch.gguf", hf_weights())


@pytest.fixture(scope="module")
def whole(scratch: Path) -> bytes:
    return scratch.read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_header_is_refused_or_harmless(scratch: Path, whole: bytes, data: st.DataObject) -> None:
    content = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(4, HEADER_BYTES))
        damage = data.draw(st.sampled_from([b"\0", b"\xff", b"\xff" * 8, *LENGTHS]) | st.binary(min_size=1, max_size=1))
        content[place : place + len(damage)] = damage
    scratch.write_bytes(content)

    try:
        model = GgufModel(scratch)
    except ConfigError:
        return
    assert model.float32_bytes > 0


@pytest.mark.parametrize("layers", [1 << 31, (1 << 32) - 1])
def test_more_layers_than_tensors_are_refused_at_once(scratch: Path, whole: bytes, layers: int) -> None:
    """Naming the tensors of so many layers would fill the memory."""
    key = b"llama.block_count"
    content = bytearray(whole)
    struct.pack_into("<I", content, whole.index(key) + len(key) + 4, layers)
    scratch.write_bytes(content)

    with pytest.raises(ConfigError, match="block_count"):
        GgufModel(scratch)


@pytest.mark.parametrize("length", [0, len(TOKENS) + 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("key", ["token_type", "tokens"])
def test_a_damaged_length_is_refused_at_once(scratch: Path, whole: bytes, key: str, length: int) -> None:
    length_at = whole.index(f"tokenizer.ggml.{key}".encode()) + len(f"tokenizer.ggml.{key}") + 8  # two types between
    assert struct.unpack_from("<Q", whole, length_at) == (len(TOKENS),)
    scratch.write_bytes(whole[:length_at] + struct.pack("<Q", length) + whole[length_at + 8 :])

    with pytest.raises(ConfigError, match=r"scratch\.gguf"):
        GgufModel(scratch)


@pytest.mark.parametrize("content", [b"GGUF", b"GGUF\x01\0\0\0" + b"\0" * 40, b"GGUF\0\0\0\x03" + b"\0" * 40])
def test_an_unreadable_version_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=r"m\.gguf"):
        GgufFile(path)


@pytest.mark.model
@pytest.mark.skipif(find_bundled_model() is None, reason="the bundled model is not installed: make model")
def test_the_bundled_model_is_what_it_should_be() -> None:
    checkpoint = open_checkpoint(str(find_bundled_model()))

    assert checkpoint.digest == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert num_parameters(checkpoint.model_config) == sum(
        checkpoint.tensor(name).size for name in checkpoint.weight_names()
    )
    assert json.loads((checkpoint.folder / "config.json").read_text())["model_type"] == "llama"
