"""The text of a sequence that is streamed or has stop strings, as far as it may be shown."""

from __future__ import annotations

from app.core.ports import DetokenizerStream
from app.text.stop_strings import StopChecker


class WatchedText:
    """Text in final pieces; what follows a stop string, and the stop string itself, never gets in."""

    def __init__(self, stream: DetokenizerStream, checker: StopChecker) -> None:
        self._stream = stream
        self._checker = checker
        self._parts: list[str] = []
        self._told = 0  # parts that `take` has returned
        self._stopped = False

    def push(self, token: int, search: bool) -> bool:
        """Take one token. -> whether a stop string was found; only text that comes while `search` is looked at."""
        return self._take(self._stream.push([token]), search)

    def take(self) -> str:
        """What has become final since the last call."""
        told, self._told = self._told, len(self._parts)
        return "".join(self._parts[told:])

    def finish(self) -> str:
        """All of the text. Call once: it flushes half a character and half a stop string that never was one."""
        if not self._stopped:
            self._take(self._stream.flush(), True)
            self._parts.append(self._checker.flush())
        return "".join(self._parts)

    def _take(self, delta: str, search: bool) -> bool:
        if not search:
            self._parts.append(delta)
            return False
        checked = self._checker.push(delta)
        self._parts.append(checked.text)
        self._stopped = checked.stopped
        return checked.stopped
