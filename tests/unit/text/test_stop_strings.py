from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import RequestError
from app.text.stop_strings import StopChecker

texts = st.text(alphabet="ab😀", max_size=20)
stop_lists = st.lists(st.text(alphabet="ab😀", min_size=1, max_size=6), max_size=4)


def by_definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """The stop that is complete first ends the text; of several complete at once, the longest is cut off."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def run(stops: list[str], deltas: list[str]) -> tuple[str, bool]:
    checker = StopChecker(stops)
    shown, stopped = "", False
    for delta in deltas:
        checked = checker.push(delta)
        shown += checked.text
        stopped = checked.stopped
    return shown + checker.flush(), stopped


@settings(deadline=None)
@given(texts, stop_lists, st.lists(st.integers(0, 20), max_size=20))
def test_any_cut_of_the_text_gives_what_the_definition_says(text: str, stops: list[str], cuts: list[int]) -> None:
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    deltas = [text[begin:end] for begin, end in itertools.pairwise(edges)]

    assert run(stops, deltas) == by_definition(text, stops)


@settings(deadline=None)
@given(texts, stop_lists)
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    checked = StopChecker(stops).push(text)

    if not checked.stopped:
        held = text[len(checked.text) :]
        longest = max(
            (size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size])),
            default=0,
        )
        assert len(held) == longest


def test_nothing_is_shown_after_a_stop() -> None:
    checker = StopChecker(["END"])

    assert checker.push("one EN").text == "one "
    ended = checker.push("D two")
    assert (ended.text, ended.stopped) == ("", True)
    assert checker.push("three").text == ""
    assert checker.flush() == ""


def test_without_stop_strings_text_passes_at_once() -> None:
    checked = StopChecker([]).push("text")
    assert (checked.text, checked.stopped) == ("text", False)


def test_what_is_held_is_flushed_once() -> None:
    checker = StopChecker(["abc"])
    checker.push("xab")

    assert checker.flush() == "ab"
    assert checker.flush() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop"):
        StopChecker(["a", ""])
