"""How single tokens are written in log-probabilities. A token may be half a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def finite(logprob: float) -> float:
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB


def chat_token(data: bytes) -> str:
    """Text; bytes that form no character are escaped, such as \\xe2\\x80."""
    return data.decode("utf-8", "backslashreplace")


def completion_token(data: bytes) -> str:
    """Text; marked with "bytes:" where bytes form no character, so that different tokens keep different names."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + chat_token(data)


class TextOffsets:
    """Where in a choice's text each token begins, in characters; a character begins with the first of its bytes."""

    def __init__(self) -> None:
        self._reader = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def push(self, tokens: Iterable[bytes]) -> list[int]:
        """The offsets of the next tokens. O(bytes)."""
        offsets = []
        for data in tokens:
            offsets.append(self._length)
            self._length += len(self._reader.decode(data))
        return offsets
