"""A tokenizer that needs no files: one token a byte of UTF-8. For fake models, examples and tests."""

from __future__ import annotations

import codecs

import numpy as np

from app.core.ports import DetokenizerStream

END_OF_SEQUENCE = 256


class ByteTokenizer:
    """Tokens 0..255 are bytes, 256 ends a sequence; ids beyond have no text."""

    def __init__(self, vocab_size: int = 257) -> None:
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return (END_OF_SEQUENCE,)

    def encode(self, text: str) -> np.ndarray:
        """(num_bytes,) int32."""
        return np.frombuffer(text.encode("utf-8", "replace"), np.uint8).astype(np.int32)

    def decode(self, token_ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        stream = ByteStream()
        return stream.push(token_ids.tolist()) + stream.flush()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < END_OF_SEQUENCE else b""

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        turns = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return turns + "assistant: " if add_generation_prompt else turns


class ByteDetokenizer:
    """`Detokenizer` for the ByteTokenizer."""

    def stream(self, *, skip_special_tokens: bool = True) -> DetokenizerStream:
        return ByteStream()


class ByteStream:
    """Bytes to text; half a character waits for the rest of it."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: list[int]) -> str:
        return self._decoder.decode(bytes(token for token in token_ids if token < END_OF_SEQUENCE))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)
