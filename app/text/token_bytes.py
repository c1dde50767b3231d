"""The bytes that single tokens stand for, read off how the tokenizer's decoder works."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_START = "▁"  # a space, in SentencePiece vocabularies


class TokenBytes:
    """Calling it with a token id gives the token's bytes, as they are in the midst of a text."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        """Reads `backend` and keeps it; does not change it."""
        steps = decoder_steps(backend)
        self._backend = backend
        self._byte_of = byte_alphabet() if "ByteLevel" in steps else {}
        self._byte_fallback = "ByteFallback" in steps
        self._marks_words = "Replace" in steps or "Metaspace" in steps

    def __call__(self, token_id: int) -> bytes:
        """Special tokens are their text as well; an id without a token is b"". O(bytes)."""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of:
            return spelt_bytes(token, self._byte_of)
        byte = BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte:
            return bytes.fromhex(byte[1])
        return (token.replace(WORD_START, " ") if self._marks_words else token).encode("utf-8")


def spelt_bytes(token: str, byte_of: Mapping[str, int]) -> bytes:
    """A token of a byte-level vocabulary. `byte_of`: `byte_alphabet()`."""
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:  # an added token is plain text, not spelt in the alphabet
        return token.encode("utf-8")


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies: printable Latin-1 is itself, the rest follows from U+0100 on."""
    alphabet = set(ByteLevel.alphabet())
    direct = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return {**direct, **{chr(256 + index): byte for index, byte in enumerate(others)}}


def decoder_steps(backend: tokenizers.Tokenizer) -> Sequence[str]:
    """The names of the decoder's steps in order; none for a tokenizer without a decoder."""
    if backend.decoder is None:
        return []
    # The library shows what a decoder is only in its pickled form, which is JSON.
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in decoder.get("decoders", [decoder])]
