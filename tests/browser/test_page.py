"""The page at `/`, in a browser: what it shows is what the server said, as text, whatever the text is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import ScriptedServer, wait_until
from tests.browser.scripted import admission, busy_state, differing, eviction, miss, prefix, state_of

pytestmark = pytest.mark.browser

LIVE = "Live: updated every second."
OpenTab = Callable[..., Any]

HOSTILE = [
    "<img src=x onerror=\"window.hacked='img'\">",
    "</script><script>window.hacked='script'</script>",
    "<svg onload=window.hacked='svg'></svg>",
    "\u202e\u2067 evil \u200f sdrawkcab",
    '"><b onmouseover=window.hacked=1>bold</b>',
    "${window.hacked='template'} {{window.hacked}} &lt;b&gt; &amp;",
]


def texts(tab: Any, selector: str) -> list[str]:
    return tab.locator(selector).all_inner_texts()


def rows(tab: Any, table: str) -> list[list[str]]:
    return [texts(row, "td") for row in tab.locator(f"#{table} tbody tr").all()]


def wait_for_status(tab: Any, words: str) -> None:
    tab.locator("#status", has_text=words).wait_for(timeout=20_000)


def test_every_part_shows_the_numbers_of_the_server(open_tab: OpenTab) -> None:
    # when
    tab = open_tab()
    wait_for_status(tab, LIVE)

    # then: the header
    assert texts(tab, "#model") == ["SmolLM2-135M-Instruct"]
    assert texts(tab, "#cache") == ["radix_cache (first that covers a model with full)"]
    assert (texts(tab, "#page-size"), texts(tab, "#uptime")) == (["16 tokens"], ["1 h 6 min"])

    # the pool
    assert texts(tab, ".tier h3") == ["device (HBM): 1,000 pages, 16,000 tokens"]
    assert [texts(row, "td") for row in tab.locator(".tier tbody tr").all()] == [
        ["150", "2,400", "15.0 %"],
        ["500", "8,000", "50.0 %"],
        ["80", "1,280", "8.0 %"],
        ["20", "320", "2.0 %"],
        ["250", "4,000", "25.0 %"],
    ]
    widths = tab.locator(".bar span").evaluate_all("spans => spans.map(span => span.style.width)")
    assert widths == ["15%", "50%", "8%", "2%", "25%"]

    # the hit rate
    assert texts(tab, "#rate-minute") == ["97.0 %"]
    assert tab.locator("#rate-words").text_content() == (
        "In the last 15 minutes 23,600 of 40,000 prompt tokens were cached, and 10,240 tokens were evicted."
    )
    assert texts(tab, "#evicted-scale") == ["6,400"]
    assert tab.locator("#chart rect").count() == 40 + 13

    # the requests
    assert texts(tab, "#running-count") == ["3 running, 1 waiting"]
    assert rows(tab, "requests")[:2] == [
        ["chatcmpl-0", "decode", "1,000", "0", "0", "1 s"],
        ["chatcmpl-1", "decode", "1,001", "16", "1", "2 s"],
    ]

    # the prefixes
    (note,) = texts(tab, "#prefixes-note")
    assert note.endswith("Ranked among the 3 most recently used of 100,000.")
    assert [row[1:] for row in rows(tab, "top")] == [
        ["1,024", "1,024", "40", "40,960", "now", "in use"],
        ["512", "512", "7", "3,584", "3 s ago", "adapter french, cache salt, rank 1"],
        ["5", "5", "0", "0", "3 s ago", "–"],
    ]
    begins, ends = "You are a helpful assistant.⏎Today is Monday", ", and it is late. Hi!"
    assert rows(tab, "top")[0][0] == f"{begins} … 1,019 tokens … {ends}"

    # the evictions
    assert rows(tab, "evicted") == [
        ["8 s ago", " Hi!, and it is late.", "480", "64", "2", "1 min"],
        ["8 s ago", " Hi!, and it is late.", "16", "64", "0", "0 s"],
    ]


def test_a_person_finds_why_a_request_was_not_a_hit(open_tab: OpenTab) -> None:
    # given
    tab = open_tab()
    wait_for_status(tab, LIVE)
    assert tab.get_by_role("heading", name="Why was this not a hit?").is_visible()
    assert len(rows(tab, "admissions")) == 11

    # when
    tab.get_by_label("Find a request by its id").fill("EVICTED")

    # then
    ((request_id, when, prompt, cached, why, _),) = rows(tab, "admissions")
    assert (request_id, when, prompt, cached) == ("chatcmpl-evicted", "33 s ago", "900", "512 (56.9 %)")
    assert why == "evictedThe tokens after the first 512 were cached, but were evicted 12 seconds earlier."
    assert texts(tab, "#found") == ["1 of the last 11"]

    # and the filter stays through the polls
    tab.get_by_label("Find a request by its id").fill("nobody")
    assert rows(tab, "admissions") == []
    assert texts(tab, "#found") == ["None of the last 11 requests has this in its id."]


def test_a_difference_is_shown_side_by_side_with_what_differs_marked(open_tab: OpenTab) -> None:
    # when
    tab = open_tab()
    wait_for_status(tab, LIVE)

    # then
    row = tab.locator("#admissions tr", has_text="chatcmpl-differs")
    assert "The first 45 tokens are those of a cached prompt; the next one differs." in row.inner_text()
    assert texts(row, ".difference span") == ["Both have", "the prompt has", "the cached one has"]
    assert texts(row, ".difference code") == [
        "… You are a helpful assistant.⏎Today is ",
        "Monday, and it is late.",
        "Tuesday, and it is late.",
    ]
    assert texts(row, "mark") == ["Monday, and it is late.", "Tuesday, and it is late."]


def test_only_the_part_that_differs_is_marked_and_look_alikes_are_told_by_their_ids(
    open_tab: OpenTab, server: ScriptedServer
) -> None:
    # given a difference in a space, one within a pair of surrogates, and one that cannot be seen
    def told(name: str, prompt: int, cached: int) -> Any:
        reason = miss("differs", 40, 16, same_tokens=20, same=(1,), prompt_goes_on=(prompt,), cached_goes_on=(cached,))
        return admission(name, reason)

    spelled = {1: "x", 10: "at 10:31", 11: "at  10:31", 12: "\U0001f600", 13: "\U0001f601", 14: "\ufffd", 15: "\ufffd"}
    server.state = state_of(
        admissions=[told("space", 10, 11), told("emoji", 12, 13), told("alike", 14, 15)],
        text_of=lambda ids: "".join(spelled[each] for each in ids),
    )

    # when
    tab = open_tab()
    wait_for_status(tab, LIVE)

    # then
    marks = {
        name: tab.locator("#admissions tr", has_text=name).locator("mark").all_text_contents()
        for name in ("space", "emoji", "alike")
    }
    assert marks["space"] == ["10:31", " 10:31"]
    assert marks["emoji"] == ["\U0001f600", "\U0001f601"]
    assert "token 14 and token 15" in tab.locator("#admissions tr", has_text="alike").inner_text()


def test_hostile_texts_are_shown_and_do_nothing(open_tab: OpenTab, server: ScriptedServer) -> None:
    # given each text everywhere where a request's text can come
    spelled = dict(enumerate(HOSTILE))
    server.state = state_of(
        model=HOSTILE[0],
        admissions=[
            admission(
                text,
                miss("differs", 9, 0, same_tokens=1, same=(i,), prompt_goes_on=(i,), cached_goes_on=((i + 1) % 6,)),
            )
            for i, text in enumerate(HOSTILE)
        ],
        prefixes=[prefix(100 - i, 1, head=(i,), tail=(i,)) for i in range(len(HOSTILE))],
        evictions=[eviction(16, head=(i,)) for i in range(len(HOSTILE))],
        text_of=lambda ids: "".join(spelled[each] for each in ids),
    )

    # when
    tab = open_tab()
    wait_for_status(tab, LIVE)
    tab.get_by_label("Find a request by its id").fill("<")

    # then it is there, letter by letter
    assert tab.locator("#model").text_content() == HOSTILE[0]
    assert [row.text_content() for row in tab.locator("#evicted td:nth-child(2)").all()] == HOSTILE
    assert tab.locator("#admissions td:first-child").all_text_contents() == [text for text in HOSTILE if "<" in text]

    # and nothing of it became part of the page
    assert tab.evaluate("window.hacked") is None
    assert [tab.locator(tag).count() for tag in ("img", "script", "section b b", "td svg", "td b")] == [0, 1, 0, 0, 0]


def test_very_long_texts_do_not_break_the_page(open_tab: OpenTab, server: ScriptedServer) -> None:
    # given texts that nobody cut, without a place to break a line
    state = busy_state()
    long = "W" * 10_000
    for table in (state["admissions"], state["requests"]["shown"]):
        table[0]["request_id"] = long
    state["admissions"][0]["difference"]["prompt"] = long
    state["top_prefixes"]["prefixes"][0]["begins"] = long
    state["evictions"][0]["begins"] = long
    state["model"] = long
    state["cache"]["reason"] = long
    server.state = state

    # then
    for width in (360, 1600):
        tab = open_tab(width=width)
        wait_for_status(tab, LIVE)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("color_scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1600])
def test_nothing_is_cut_off_at_any_width(open_tab: OpenTab, width: int, color_scheme: str) -> None:
    # when
    tab = open_tab(width=width, color_scheme=color_scheme)
    wait_for_status(tab, LIVE)

    # then
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for region in tab.locator(".scroll").all():
        assert region.evaluate("element => element.scrollWidth <= element.clientWidth"), region.get_attribute(
            "aria-labelledby"
        )
    assert tab.get_by_role("heading", name="Why was this not a hit?").is_visible()


def test_tables_and_controls_have_names_for_a_screen_reader(open_tab: OpenTab) -> None:
    for width in (360, 1600):
        # when
        tab = open_tab(width=width)
        wait_for_status(tab, LIVE)

        # then: in cards too, a table is a table
        assert tab.get_by_role("columnheader", name="Why not more", include_hidden=True).count() == 1
        assert tab.locator("#admissions").get_by_role("row").count() == 12
        assert tab.locator("#admissions").get_by_role("cell").count() == 66
        assert tab.get_by_role("searchbox", name="Find a request by its id").count() == 1
        assert tab.get_by_role("status").inner_text() == LIVE
        label = tab.get_by_role("img", name=re.compile("Cached, in use by requests: 15.0 %; .*; Free: 25.0 %"))
        assert label.count() == 1


def test_an_idle_server_says_that_nothing_happened(open_tab: OpenTab, server: ScriptedServer) -> None:
    # given
    server.state = state_of()

    # when
    tab = open_tab()
    wait_for_status(tab, LIVE)

    # then
    assert (texts(tab, "#rate-minute"), texts(tab, "#rate-all")) == (["–"], ["–"])
    words = ["No request has been admitted.", "No request is being served.", "Nothing has been evicted."]
    assert texts(tab, ".scroll p:visible") == [*words, "Nothing is cached."]
    assert tab.locator("table.cards:visible").count() == 0


def test_the_page_follows_the_server_and_keeps_its_rows(open_tab: OpenTab, server: ScriptedServer) -> None:
    # given
    tab = open_tab()
    wait_for_status(tab, LIVE)
    tab.locator("#admissions tr", has_text="chatcmpl-short").evaluate("row => { row.id = 'kept' }")

    # when one more request comes, and one leaves
    state = busy_state()
    server.state = state | {
        "admissions": [state_of(admissions=[differing("request-new")])["admissions"][0], *state["admissions"][:-1]]
    }

    # then the old row is the same one, in its new place
    tab.locator("#admissions tr", has_text="request-new").wait_for()
    ids = [row[0] for row in rows(tab, "admissions")]
    assert (ids[0], ids[1], len(ids)) == ("request-new", "chatcmpl-differs", 11)
    assert "chatcmpl-untold" not in ids
    assert "chatcmpl-short" in tab.locator("#kept").inner_text()


def test_a_server_that_asks_for_a_key_gets_it_and_the_page_goes_on(open_tab: OpenTab, server: ScriptedServer) -> None:
    # given
    server.key = "right"
    tab = open_tab()
    wait_for_status(tab, "This server asks for a key.")
    key = tab.get_by_label("Key", exact=True)
    assert key.evaluate("field => field === document.activeElement")

    # when it cannot be a key, then when it is a wrong one
    key.fill("schlüssel")
    key.press("Enter")
    wait_for_status(tab, "A key has only letters, digits and signs of ASCII")
    key.fill("wrong")
    key.press("Enter")
    wait_for_status(tab, "The server refused this key.")

    # when it is the right one
    key.fill("right")
    key.press("Enter")

    # then
    wait_for_status(tab, LIVE)
    assert not key.is_visible()
    assert len(rows(tab, "admissions")) == 11

    # and it is kept for this tab, and nowhere else
    tab.reload()
    wait_for_status(tab, LIVE)
    assert tab.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie, location.href]") == [
        ["right"],
        0,
        "",
        server.url,
    ]


def test_a_server_that_goes_away_and_comes_back_is_shown_again(open_tab: OpenTab, server: ScriptedServer) -> None:
    # given
    tab = open_tab()
    wait_for_status(tab, LIVE)

    # when it goes away
    server.stop()

    # then what was known stays
    wait_for_status(tab, "The server is not reachable. Trying again.")
    assert len(rows(tab, "admissions")) == 11

    # when it comes back with news
    server.state = state_of(admissions=[differing("afterwards")])
    server.start()

    # then
    wait_for_status(tab, LIVE)
    assert [row[0] for row in rows(tab, "admissions")] == ["afterwards"]


def test_a_server_that_answers_with_an_error_is_asked_again(open_tab: OpenTab, server: ScriptedServer) -> None:
    server.status = 503
    tab = open_tab()
    wait_for_status(tab, "The server answered with status 503. Trying again.")
    server.status = 200
    wait_for_status(tab, LIVE)


def test_a_hidden_tab_does_not_ask(open_tab: OpenTab, server: ScriptedServer) -> None:
    # given
    tab = open_tab()
    wait_for_status(tab, LIVE)

    def hide(hidden: bool) -> None:
        tab.evaluate(
            "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true});"
            " document.dispatchEvent(new Event('visibilitychange')) }",
            hidden,
        )

    # when, for as long as two polls and more
    hide(True)
    tab.wait_for_timeout(300)
    polls = server.polls
    tab.wait_for_timeout(2500)

    # then
    assert server.polls == polls

    # when it is seen again
    hide(False)
    wait_until(lambda: tab.wait_for_timeout(50) is None and server.polls > polls + 1)
