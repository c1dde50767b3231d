"""Text of a growing answer, token by token, exactly as if all of it had been decoded at once.

Two ways, by what the tokenizer's decoder does:

- byte level (GPT-2, Llama 3, Qwen, SmolLM): the text is the lossy UTF-8 reading of the tokens' bytes, and an
  incremental UTF-8 reader gives just that. It holds back at most three bytes.
- any other (SentencePiece style): a token's text depends on the token before it, so each new group is decoded behind
  the last group with a text, and what the two give beyond that one's own text is new. A run of byte tokens is held back
  until it ends, because the library turns all of the run into U+FFFD when any byte of it is bad.

Either way the work per token is constant, whatever the length of the answer.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import tokenizers

from app.core.ports import DetokenizerStream
from app.errors import ConfigError
from app.text.token_bytes import BYTE_TOKEN, byte_alphabet, decoder_steps, spelt_bytes
from app.text.tokenizer import HfTokenizer


class IncrementalDetokenizer:
    """`core.ports.Detokenizer` for one tokenizer. Streams of different requests are independent."""

    def __init__(self, tokenizer: HfTokenizer) -> None:
        """Raises ConfigError for a decoder that mixes byte level with other steps: it cannot be read in pieces."""
        self._backend = tokenizer.backend
        self._special_ids = frozenset(
            token_id for token_id, token in self._backend.get_added_tokens_decoder().items() if token.special
        )
        self._make_stream = _stream_maker(self._backend)

    def stream(self, *, skip_special_tokens: bool = True) -> DetokenizerStream:
        """The text of one request from its first output token on."""
        return self._make_stream(self._special_ids if skip_special_tokens else frozenset())


class ByteLevelStream:
    """`core.ports.DetokenizerStream` for tokens that spell bytes."""

    def __init__(self, backend: tokenizers.Tokenizer, byte_of: Mapping[str, int], skipped: frozenset[int]) -> None:
        """`byte_of`: the alphabet, character -> byte. `skipped`: ids that have no text in this stream."""
        self._backend = backend
        self._byte_of = byte_of
        self._skipped = skipped
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become final with these tokens; never half a character. O(bytes of the tokens)."""
        return self._reader.decode(b"".join(self._bytes(token_id) for token_id in token_ids))

    def flush(self) -> str:
        """U+FFFD for a character that was begun and never ended, once."""
        text = self._reader.decode(b"", final=True)
        self._reader.reset()
        return text

    def _bytes(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._backend.id_to_token(token_id)
        if token is None:  # skipped, or beyond the vocabulary: the library leaves such ids out as well
            return b""
        return spelt_bytes(token, self._byte_of)


class WindowStream:
    """`core.ports.DetokenizerStream` for decoders whose text for a token depends on its neighbour."""

    def __init__(self, backend: tokenizers.Tokenizer, byte_fallback: bool, skipped: frozenset[int]) -> None:
        """`byte_fallback`: tokens like <0xE3> spell bytes. `skipped`: ids that have no text in this stream."""
        self._backend = backend
        self._byte_fallback = byte_fallback
        self._skipped = skipped
        self._shown: list[int] = []  # the last group whose text is out
        self._shown_length = 0  # characters of that group decoded on its own
        self._pending: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become final with these tokens. O(tokens), amortised."""
        tokens = [(token_id, self._token(token_id)) for token_id in token_ids]
        known = [(token_id, token) for token_id, token in tokens if token is not None]
        self._pending += [token_id for token_id, _ in known]
        if not known or (self._byte_fallback and BYTE_TOKEN.fullmatch(known[-1][1])):
            return ""
        return self._release()

    def flush(self) -> str:
        """The text of a run of bytes that nothing followed, once."""
        return self._release() if self._pending else ""

    def _token(self, token_id: int) -> str | None:
        return None if token_id in self._skipped else self._backend.id_to_token(token_id)

    def _release(self) -> str:
        text = self._decode(self._shown + self._pending)[self._shown_length :]
        if text:  # a group without a text stays: alone it would not show how a neighbour is joined
            self._shown, self._pending = self._pending, []
            self._shown_length = len(self._decode(self._shown))
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)  # they were left out when they came


def _stream_maker(backend: tokenizers.Tokenizer) -> Callable[[frozenset[int]], DetokenizerStream]:
    steps = decoder_steps(backend)
    if steps == ["ByteLevel"]:
        return partial(ByteLevelStream, backend, byte_alphabet())
    if "ByteLevel" in steps:
        raise ConfigError(
            field="model_path", value=steps, allowed="a tokenizer whose decoder is ByteLevel alone or has no ByteLevel"
        )
    return partial(WindowStream, backend, "ByteFallback" in steps)
