"""A browser without a window, and a server whose answers the tests script. Skipped where there is no browser."""

from __future__ import annotations

import copy
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.browser.scripted import PAGE_POLICY, busy_state

PAGE = Path(__file__).parents[2] / "app" / "server" / "page.html"


class ScriptedServer:
    """Serves the page as the real server does, and `state`; asks for `key` if it has one."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = busy_state()
        self.key: str | None = None
        self.status = 200
        self.polls = 0
        self._port = 0
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def start(self) -> None:
        """On a free port; on the same one when it comes back."""
        app = Starlette(routes=[Route("/", self._page), Route("/cache_state", self._cache_state)])
        config = uvicorn.Config(
            app,
            host="127.0.0.1",
            port=self._port,
            log_level="error",
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        wait_until(lambda: self._server is not None and self._server.started)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(10)

    def _page(self, request: Request) -> Response:
        return Response(PAGE.read_bytes(), media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})

    def _cache_state(self, request: Request) -> Response:
        self.polls += 1
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no"}}, 401)
        return JSONResponse(copy.deepcopy(self.state), self.status)


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    server = ScriptedServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next((found for found in map(shutil.which, names) if found), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(names)} is on the PATH")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A tab, and what went wrong in it."""

    def __init__(self, context: Any) -> None:
        self.tab = context.new_page()
        self.errors: list[str] = []
        self.requested: list[str] = []
        self.tab.on("console", self._note)
        self.tab.on("pageerror", lambda error: self.errors.append(str(error)))
        self.tab.on("request", lambda request: self.requested.append(request.url))

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def open(self, url: str) -> Any:
        self.tab.goto(url)
        return self.tab


@pytest.fixture
def open_tab(browser: Any, server: ScriptedServer) -> Iterator[Callable[..., Any]]:
    """Opens the server's page: `open_tab(width=360, color_scheme="dark")`.

    Afterwards: no script failed, nothing was reported to the console, and nothing was asked of anybody else. That a
    request failed the browser reports itself, and tests that make one fail mean it.
    """
    contexts, watched = [], []

    def open_(width: int = 1280, height: int = 900, **settings: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **settings)
        contexts.append(context)
        watched.append(Watched(context))
        return watched[-1].open(server.url)

    yield open_
    for context in contexts:
        context.close()
    for each in watched:
        assert [error for error in each.errors if not error.startswith("Failed to load resource")] == []
        assert {url for url in each.requested if not url.startswith((server.url, "data:"))} == set()
        assert server.url + "cache_state" in each.requested
