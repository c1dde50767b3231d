"""The page of a real server: what two clients did is seen on it, and why the second one missed."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support.server import MODEL, running_server

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


def test_the_page_tells_why_a_prompt_was_not_a_hit(browser: Any) -> None:
    with running_server(page_size=4) as server:

        def ask(prompt: str) -> str:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
            return str(httpx.post(f"{server.url}/v1/completions", json=body).json()["id"])

        # given: a prompt, the same again, and one that goes on differently after 20 bytes
        ask("At 10:15 the train leaves from platform 4.")
        again = ask("At 10:15 the train leaves from platform 4.")
        changed = ask("At 10:15 the train arrives at platform 4.")

        # when
        tab = browser.new_page()
        errors: list[str] = []
        tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        tab.goto(server.url)

        # then
        find = tab.get_by_label("Find a request by its id")
        table = tab.locator("#admissions")
        find.fill(again)
        playwright.expect(table).to_contain_text("Everything that can be reused was")
        find.fill(changed)
        playwright.expect(table).to_contain_text(
            "The first 19 tokens are those of a cached prompt; the next one differs."
        )
        playwright.expect(table).to_contain_text("arrives")
        playwright.expect(table).to_contain_text("leaves")
        playwright.expect(tab.locator("#top")).to_contain_text("At 10:15 the train")
        assert errors == []
        tab.close()
