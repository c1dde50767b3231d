from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from app.models.bundled import find_bundled_model
from app.models.checkpoint import open_checkpoint
from app.text.byte_tokenizer import END_OF_SEQUENCE, ByteTokenizer
from app.text.token_bytes import byte_alphabet
from app.text.tokenizer import HfTokenizer, load_tokenizer

CHARACTER_OF = {byte: character for character, byte in byte_alphabet().items()}
SPECIAL = "<|end|>"
PLAIN = "日本 plain"
LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def tokenizer_of(tokens: Sequence[str], decoder: decoders.Decoder | None) -> HfTokenizer:
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens([SPECIAL])
    backend.add_tokens([PLAIN])
    return HfTokenizer(backend)


def byte_level(chunks: Sequence[bytes]) -> HfTokenizer:
    return tokenizer_of(["".join(CHARACTER_OF[byte] for byte in chunk) for chunk in chunks], decoders.ByteLevel())


def test_byte_level_tokens_are_their_bytes() -> None:
    chunks = [b"Hi", b" there", b"\n", "語".encode(), b"\xe3\x81", b"\x82", b"\x00\xff\xad"]
    tokenizer = byte_level(chunks)

    assert [tokenizer.token_bytes(token_id) for token_id in range(len(chunks))] == chunks


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=8, unique=True))
def test_byte_level_tokens_put_together_are_the_decoded_text(chunks: list[bytes]) -> None:
    tokenizer = byte_level(chunks)
    token_ids = np.arange(len(chunks), dtype=np.int32)

    together = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids.tolist())

    assert together == b"".join(chunks)
    assert together.decode("utf-8", "replace") == tokenizer.decode(token_ids)


def test_sentencepiece_tokens_have_spaces_and_bytes() -> None:
    tokens = ["▁", "▁Hi", "there", "▁▁", "é", "<0xE3>", "<0x0a>", "<0xGG>", "a▁b"]
    tokenizer = tokenizer_of(tokens, LLAMA)

    assert [tokenizer.token_bytes(token_id) for token_id in range(len(tokens))] == [
        b" ",
        b" Hi",
        b"there",
        b"  ",
        "é".encode(),
        b"\xe3",
        b"\n",
        b"<0xGG>",
        b"a b",
    ]


def test_a_token_that_looks_like_a_byte_is_text_without_byte_fallback() -> None:
    tokenizer = tokenizer_of(["<0xE3>", "▁a"], decoders.Metaspace())

    assert [tokenizer.token_bytes(token_id) for token_id in (0, 1)] == [b"<0xE3>", b" a"]


def test_without_a_decoder_a_token_is_its_text() -> None:
    assert tokenizer_of(["▁a"], None).token_bytes(0) == "▁a".encode()


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), LLAMA, None], ids=["byte_level", "llama", "none"])
def test_added_tokens_are_their_text(decoder: decoders.Decoder | None) -> None:
    tokenizer = tokenizer_of(["a"], decoder)

    assert tokenizer.token_bytes(1) == SPECIAL.encode()
    assert tokenizer.token_bytes(2) == PLAIN.encode()


@pytest.mark.parametrize("added", [SPECIAL, PLAIN, "▁mark", "<0x41>", "é"])
@pytest.mark.parametrize(
    "decoder", [decoders.ByteLevel(), LLAMA, decoders.Metaspace()], ids=["bytes", "llama", "words"]
)
def test_an_added_token_is_what_answers_show_of_it(decoder: decoders.Decoder, added: str) -> None:
    tokenizer = tokenizer_of(["a"], decoder)
    tokenizer.backend.add_tokens([added])
    token_id = tokenizer.backend.token_to_id(added)

    shown = tokenizer.decode(np.array([0, token_id]), skip_special_tokens=False)

    assert "a" + tokenizer.token_bytes(token_id).decode("utf-8", "replace") == shown


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), LLAMA, None], ids=["byte_level", "llama", "none"])
def test_an_id_without_a_token_has_no_bytes(decoder: decoders.Decoder | None) -> None:
    assert tokenizer_of(["a"], decoder).token_bytes(3) == b""
    assert tokenizer_of(["a"], decoder).token_bytes(2**31 - 1) == b""


def test_the_byte_tokenizers_tokens_are_bytes() -> None:
    tokenizer = ByteTokenizer(vocab_size=300)

    assert b"".join(map(tokenizer.token_bytes, range(256))) == bytes(range(256))
    assert tokenizer.token_bytes(END_OF_SEQUENCE) == b""
    assert tokenizer.token_bytes(299) == b""


@pytest.mark.model
@pytest.mark.skipif(find_bundled_model() is None, reason="the bundled model is not installed: make model")
@pytest.mark.parametrize(
    "text", ["Hello, world!", "naïve 日本語 😀\n\tx", "👩‍👩‍👧 a  b", "<|im_start|>user\nhi<|im_end|>"]
)
def test_the_bundled_models_tokens_put_together_are_the_text(text: str) -> None:
    tokenizer = load_tokenizer(open_checkpoint(str(find_bundled_model())).folder)

    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text).tolist())) == text.encode()
