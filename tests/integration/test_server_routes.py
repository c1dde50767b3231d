"""The routes that the application has are those of its description, of its guard, and of the documentation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from app.config.http_args import HttpArgs
from app.providers.testing import overridden
from app.server.assembly import assemble
from app.server.engine_loop import EngineLoop
from app.server.guard import ADMIN_PATHS, OPEN_PATHS
from app.server.openapi import document
from tests.support.asking import CHAT, COMPLETIONS, Asker
from tests.support.engine import server_args
from tests.support.server import MODEL, RunningServer, running_server

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


def routes_of_the_application() -> set[tuple[str, str]]:
    async def make() -> set[tuple[str, str]]:
        with overridden(server_args(), fake=True) as container:
            parts = assemble(container)
            engine = EngineLoop(parts.scheduler, parts.adapter, parts.watch, queue_timeout_s=1, on_failure=lambda: None)
            _, texts, app = parts.make_app(engine, HttpArgs(), "0")
            texts.close()
        routes = [route for route in app.routes if isinstance(route, Route)]
        assert len(routes) == len(app.routes)
        return {(method, route.path.replace(":path", "")) for route in routes for method in (route.methods or ())}

    return asyncio.run(make())


def routes_of(description: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method.upper(), path): operation
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    }


def test_the_description_has_every_route_and_no_other() -> None:
    described = set(routes_of(document("0")))
    with_heads = described | {("HEAD", path) for method, path in described if method == "GET"}

    assert routes_of_the_application() == with_heads


def test_the_guard_knows_only_routes_that_there_are_and_opens_what_the_description_says() -> None:
    described = routes_of(document("0"))
    paths = {path for _, path in described}

    assert paths >= ADMIN_PATHS | OPEN_PATHS
    assert not ADMIN_PATHS & OPEN_PATHS
    assert {path for (_, path), operation in described.items() if operation.get("security") == []} == OPEN_PATHS


def test_the_documentation_names_every_route_with_its_key() -> None:
    table = DOCUMENT.read_text().partition("## Routes")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([A-Z]+) (.*?)` \| (\w+) \|", table, re.MULTILINE)
    named = {(method, path): key for method, paths, key in rows for path in paths.split("`, `")}

    def key_of(path: str) -> str:
        return "open" if path in OPEN_PATHS else "admin" if path in ADMIN_PATHS else "client"

    described = {(method, path): key_of(path) for method, path in routes_of(document("0"))}
    del described["GET", "/openapi.json"]  # it describes the others, and is named in the text above the table
    assert named == described
    assert "`GET /openapi.json`" in DOCUMENT.read_text()


def test_the_served_description_is_that_of_the_installed_version(server: RunningServer) -> None:
    with Asker(server.url) as asker:
        served = asker.http.get("/openapi.json").json()

    assert served == document(served["info"]["version"])


def test_tokens_and_text_are_turned_into_each_other(server: RunningServer) -> None:
    with Asker(server.url) as asker:
        text = asker.http.post("/tokenize", json={"model": MODEL, "prompt": "né"}).json()
        chat = asker.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
        back = asker.http.post("/detokenize", json={"tokens": text["tokens"]}).json()
        counts = [
            asker.whole(COMPLETIONS, prompt="né", max_tokens=1).usage["prompt_tokens"],
            asker.whole(CHAT, messages=[{"role": "user", "content": "x"}], max_tokens=1).usage["prompt_tokens"],
        ]

    assert text == {"count": 3, "max_model_len": 128, "tokens": [0x6E, 0xC3, 0xA9]}
    assert back == {"prompt": "né"}
    assert counts == [text["count"], chat["count"]]


def test_the_state_of_the_cache_shows_what_is_served_and_cached(server: RunningServer) -> None:
    with Asker(server.url) as asker:
        asker.cached_tokens("what the page shows of this")
        asker.wait_until_idle()
        state, info = asker.http.get("/cache_state").json(), asker.info()

    assert state["requests"]["shown"] == []
    assert "what the page shows of this"[:20] in str(state)
    assert (info["model"], info["cache_type"], info["page_size"], info["pool_tokens"]) == (MODEL, "radix_cache", 4, 256)


def test_a_head_is_answered_without_a_body(server: RunningServer) -> None:
    with Asker(server.url) as asker:
        for path in ("/health", "/v1/models", "/metrics", "/"):
            reply = asker.http.head(path)
            assert (reply.status_code, reply.content) == (200, b"")
