"""Ending an answer at a stop string, in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedText:
    """text: what may be shown now. stopped: a stop string was found; it and all after it are left out."""

    text: str
    stopped: bool


class StopChecker:
    """Shows text as soon as no part of it can belong to a stop string.

    The stop string that is complete first wins (of several ending together, the longest), so the outcome does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises RequestError for an empty stop string. O(characters of all stops)."""
        if "" in stops:
            raise RequestError(field="stop", value=list(stops), allowed="texts of at least one character")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self._stopped = False

    def push(self, delta: str) -> CheckedText:
        """Take the next piece of text. After a stop nothing is shown any more. O(len(delta) * stops), amortised."""
        if self._stopped:
            return CheckedText(text="", stopped=True)
        text = self._held + delta
        for index, character in enumerate(delta, start=len(self._held) + 1):
            complete = [matcher.size for matcher in self._matchers if matcher.advance(character)]
            if complete:
                self._held, self._stopped = "", True
                return CheckedText(text=text[: index - max(complete)], stopped=True)
        cut = len(text) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[cut:]
        return CheckedText(text=text[:cut], stopped=False)

    def flush(self) -> str:
        """What was held back, at the end of an answer that met no stop string; once."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt: how many first characters of `stop` the text ends with."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = _borders(stop)
        self.size = len(stop)
        self.matched = 0

    def advance(self, character: str) -> bool:
        """Whether `stop` is complete with this character. Not to be called after that."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self._stop[self.matched] == character:
            self.matched += 1
        return self.matched == self.size


def _borders(text: str) -> list[int]:
    """For each prefix of `text`, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for index in range(1, len(text)):
        while length and text[index] != text[length]:
            length = borders[length - 1]
        length += text[index] == text[length]
        borders[index] = length
    return borders
