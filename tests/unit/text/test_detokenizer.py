from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from app.core.ports import DetokenizerStream
from app.errors import ConfigError
from app.text.detokenizer import IncrementalDetokenizer, byte_alphabet
from app.text.tokenizer import HfTokenizer

CHARACTER_OF = {byte: character for character, byte in byte_alphabet().items()}
SPECIAL = "<|end|>"
PLAIN = "日本 plain"

# 1 to 4 bytes, combining marks, joined emoji, flags, and bytes that belong to no character.
PIECES = [
    *(
        text.encode()
        for text in ["a", "\n", "é", "e\u0301", "ก็", "語", "\ufffd", "😀", "👩\u200d👩\u200d👧", "🇫🇷", "👍🏽"]
    ),
    *(b"\xff", b"\xc3", b"\xe3\x81", b"\xf0\x9f\x98", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b"\x80"),
]
byte_strings = st.lists(st.sampled_from(PIECES) | st.binary(max_size=3), max_size=12).map(b"".join)


def byte_level(chunks: Sequence[bytes]) -> HfTokenizer:
    """One token for each distinct chunk of bytes, a special token and a plain added one."""
    tokens = {"".join(CHARACTER_OF[byte] for byte in chunk): chunk for chunk in chunks}
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([SPECIAL])
    backend.add_tokens([PLAIN])
    return HfTokenizer(backend)


def window_backend() -> Tokenizer:
    backend = Tokenizer(models.BPE(vocab={"▁a": 0}, merges=[]))
    backend.decoder = decoders.Metaspace()
    return backend


def ids_of(tokenizer: HfTokenizer, chunks: Sequence[bytes]) -> list[int]:
    return [tokenizer.backend.token_to_id("".join(CHARACTER_OF[byte] for byte in chunk)) for chunk in chunks]


def deltas(stream: DetokenizerStream, token_ids: list[int], interval: int) -> list[str]:
    pushed = [stream.push(token_ids[start : start + interval]) for start in range(0, len(token_ids), interval)]
    return [*pushed, stream.flush()]


@st.composite
def cut_byte_strings(draw: st.DrawFn) -> list[bytes]:
    data = draw(byte_strings)
    cuts = draw(st.lists(st.integers(0, len(data)), max_size=len(data)))
    edges = sorted({0, *cuts, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


@settings(deadline=None)
@given(cut_byte_strings(), st.integers(1, 5))
def test_deltas_are_the_decoding_of_all_ids(chunks: list[bytes], interval: int) -> None:
    tokenizer = byte_level(chunks)
    token_ids = ids_of(tokenizer, chunks)

    pieces = deltas(IncrementalDetokenizer(tokenizer).stream(), token_ids, interval)

    assert "".join(pieces) == tokenizer.decode(np.array(token_ids, dtype=np.int32))
    assert "".join(pieces) == b"".join(chunks).decode("utf-8", "replace")


def test_every_split_of_a_text_gives_the_same_text() -> None:
    data = "é語😀".encode()  # 2 + 3 + 4 bytes
    for marks in itertools.product([False, True], repeat=len(data) - 1):
        edges = [0, *(index + 1 for index, mark in enumerate(marks) if mark), len(data)]
        chunks = [data[begin:end] for begin, end in itertools.pairwise(edges)]
        tokenizer = byte_level(chunks)

        pieces = deltas(IncrementalDetokenizer(tokenizer).stream(), ids_of(tokenizer, chunks), interval=1)

        assert "".join(pieces) == "é語😀"
        assert "\ufffd" not in "".join(pieces)


def test_a_character_is_never_shown_by_halves() -> None:
    chunks = [bytes([byte]) for byte in "😀a".encode()]
    tokenizer = byte_level(chunks)

    pieces = deltas(IncrementalDetokenizer(tokenizer).stream(), ids_of(tokenizer, chunks), interval=1)

    assert pieces == ["", "", "", "😀", "a", ""]


def test_trailing_partial_bytes_are_flushed_once() -> None:
    tokenizer = byte_level([b"a", b"\xe3\x81"])
    stream = IncrementalDetokenizer(tokenizer).stream()

    assert stream.push(ids_of(tokenizer, [b"a", b"\xe3\x81"])) == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


@pytest.mark.parametrize("skip", [True, False])
def test_special_tokens_are_left_out_only_when_asked(skip: bool) -> None:
    tokenizer = byte_level([b"a", b"\xc3"])
    token_ids = [*ids_of(tokenizer, [b"a", b"\xc3"]), *map(tokenizer.backend.token_to_id, [SPECIAL, PLAIN]), 10_000]

    pieces = deltas(IncrementalDetokenizer(tokenizer).stream(skip_special_tokens=skip), token_ids, interval=1)

    assert "".join(pieces) == tokenizer.decode(np.array(token_ids), skip_special_tokens=skip)
    assert (SPECIAL in "".join(pieces)) is not skip
    assert PLAIN in "".join(pieces)


def test_streams_of_one_detokenizer_do_not_mix() -> None:
    tokenizer = byte_level([b"\xc3", b"\xa9"])
    first_half, second_half = ids_of(tokenizer, [b"\xc3", b"\xa9"])
    detokenizer = IncrementalDetokenizer(tokenizer)
    one, other = detokenizer.stream(), detokenizer.stream()

    assert one.push([first_half]) == other.push([first_half]) == ""
    assert one.push([second_half]) == "é"
    assert other.flush() == "\ufffd"


NEIGHBOUR_DECODERS = {
    "llama2": decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Metaspace(),
    "bpe_suffix": decoders.BPEDecoder(),
    "word_pieces": decoders.WordPiece(cleanup=False),
    "none": None,
}
NEIGHBOUR_TOKENS = [
    "▁",
    "▁▁",
    "▁a",
    "b",
    "##c",
    "d</w>",
    "é",
    "\ufffd",
    "<0xE3>",
    "<0x81>",
    "<0x82>",
    "<0x41>",
    "<0xFF>",
]


@pytest.mark.parametrize("decoder", NEIGHBOUR_DECODERS)
@settings(deadline=None)
@given(token_ids=st.lists(st.integers(0, len(NEIGHBOUR_TOKENS) + 1), max_size=20), interval=st.integers(1, 5))
def test_deltas_are_the_decoding_of_all_ids_where_neighbours_matter(
    decoder: str, token_ids: list[int], interval: int
) -> None:
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(NEIGHBOUR_TOKENS)}, merges=[]))
    backend.decoder = NEIGHBOUR_DECODERS[decoder]
    backend.add_special_tokens([SPECIAL])  # the id after it has no token
    tokenizer = HfTokenizer(backend)

    pieces = deltas(IncrementalDetokenizer(tokenizer).stream(), token_ids, interval)

    assert "".join(pieces) == tokenizer.decode(np.array(token_ids, dtype=np.int32))


def test_a_decoder_that_mixes_byte_level_with_other_steps_is_refused() -> None:
    backend = Tokenizer(models.BPE())
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])

    with pytest.raises(ConfigError, match="ByteLevel"):
        IncrementalDetokenizer(HfTokenizer(backend))


@pytest.mark.parametrize("backend", [byte_level([b"\xff"]).backend, window_backend()], ids=["byte_level", "window"])
def test_work_per_token_does_not_grow_with_the_answer(backend: Tokenizer) -> None:
    counted = CountingBackend(backend)
    stream = IncrementalDetokenizer(counted).stream()  # type: ignore[arg-type]

    for _ in range(2000):
        stream.push([0])

    assert counted.decoded_ids <= 3 * 2000


class CountingBackend:
    """Counts the ids that the library is asked to decode. Stands for both the tokenizer and its backend."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        self.decoded_ids = 0
        self.decoder = backend.decoder
        self.id_to_token = backend.id_to_token
        self.get_added_tokens_decoder = backend.get_added_tokens_decoder

    @property
    def backend(self) -> CountingBackend:
        return self

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.decoded_ids += len(token_ids)
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
