from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from app.errors import ConfigError, RequestError
from app.text.tokenizer import load_tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A byte-level tokenizer whose file asks for a BOS, a maximum length and padding."""
    backend = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|eot|>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=8, pad_id=257, pad_token="</s>")
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder: Path, name: str, content: Any) -> None:
    (folder / name).write_text(json.dumps(content))


def test_encoding_adds_nothing_cuts_nothing_and_knows_special_tokens(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)

    token_ids = tokenizer.encode("<s>hello world</s>")

    assert token_ids.dtype == np.int32
    assert token_ids.shape == (13,)
    assert token_ids[[0, -1]].tolist() == [256, 257]
    assert tokenizer.decode(token_ids) == "hello world"
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == "<s>hello world</s>"
    assert tokenizer.vocab_size == 259
    assert tokenizer.encode("").shape == (0,)


@pytest.mark.parametrize("text", ["\ud800", "a\udfff b"])
def test_half_a_surrogate_pair_is_a_request_error(folder: Path, text: str) -> None:
    with pytest.raises(RequestError, match="surrogate") as caught:
        load_tokenizer(folder).encode(text)
    assert caught.value.field == "prompt"


@pytest.mark.parametrize("text", ["\0", "\ufffe\uffff", "\u202e", "a\u0300" * 50, "\U0010ffff"])
def test_odd_text_survives_the_round_trip(folder: Path, text: str) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("generation", "config", "end_token", "expected"),
    [
        ({"eos_token_id": [258, 257]}, {"eos_token_id": 256}, "</s>", (258, 257)),
        ({"eos_token_id": 258}, None, "</s>", (258, 257)),
        ({}, {"eos_token_id": 257}, None, (257,)),
        (None, None, {"content": "<|eot|>", "special": True}, (258,)),
        (None, None, "no such token", ()),
        (None, None, None, ()),
    ],
)
def test_end_tokens_come_from_generation_settings_then_config_and_the_tokenizer(
    folder: Path, generation: Any, config: Any, end_token: Any, expected: tuple[int, ...]
) -> None:
    for name, content in [("generation_config.json", generation), ("config.json", config)]:
        if content is not None:
            write(folder, name, content)
    write(folder, "tokenizer_config.json", {"eos_token": end_token})

    assert load_tokenizer(folder).eos_token_ids == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}hi",
        [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ bos_token }}hi"}],
    ],
)
def test_the_chat_template_is_found_in_the_tokenizers_config(folder: Path, template: Any) -> None:
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "chat_template": template})

    assert load_tokenizer(folder).apply_chat_template(HELLO) == "<s>hi"


def test_a_template_file_of_its_own_comes_first(folder: Path) -> None:
    write(folder, "tokenizer_config.json", {"chat_template": "other"})
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} é", encoding="utf-8")

    assert load_tokenizer(folder).apply_chat_template(HELLO) == "hi é"


def test_without_a_template_the_error_says_what_to_do(folder: Path) -> None:
    with pytest.raises(RequestError, match="--raw"):
        load_tokenizer(folder).apply_chat_template(HELLO)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model_path=.*tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{}"),
        ("tokenizer.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"{"),
        ("tokenizer_config.json", b"\xff"),
        ("generation_config.json", b"[]"),
        ("generation_config.json", b'{"eos_token_id": "</s>"}'),
        ("chat_template.jinja", b"\xff"),
        ("chat_template.jinja", b"{% if %}"),
    ],
)
def test_a_damaged_file_is_refused(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)

    with pytest.raises(ConfigError):
        load_tokenizer(folder)
