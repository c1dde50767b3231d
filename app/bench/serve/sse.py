"""Server-sent events out of the bytes of a stream, wherever the network cut them."""

from __future__ import annotations

from collections.abc import Iterator

_MOST_BYTES = 16 * 2**20


class EventTooLongError(Exception):
    """An event does not end: what is sent is no stream of events."""


class EventSplitter:
    """Takes bytes as they come and gives out the data of each event that is whole.

    Lines are split at line ends only. The line readers of HTTP clients split at other separators of Unicode, too, and
    such a character may stand inside an answer.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, received: bytes) -> Iterator[bytes]:
        """The data of events that `received` completes. O(len(received)) but for one line that spans several calls."""
        *lines, self._rest = (self._rest + received).split(b"\n")
        if len(self._rest) > _MOST_BYTES:
            raise EventTooLongError(f"an event is longer than {_MOST_BYTES} bytes")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []

    @property
    def unfinished(self) -> bool:
        """Whether an event has begun that has not ended."""
        return bool(self._rest or self._data)
