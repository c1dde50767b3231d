"""A whole server, over the fake model unless told otherwise, on a free port of 127.0.0.1."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from app.config.http_args import HttpArgs
from app.providers.testing import Override, overridden
from app.server.assembly import Parts, assemble
from app.server.kv_event_publisher import KvEventPublisher, opened_publisher
from app.server.run import listen, serve
from app.server.shutdown import Shutdown
from app.tpu.cpu_fake import fake_model_config
from tests.support.engine import CONTEXT_LENGTH, VOCAB_SIZE, server_args

MODEL = "fake"


@dataclass
class RunningServer:
    """`url` has no slash at its end. `parts` belong to the server's threads: look, do not call."""

    url: str
    parts: Parts
    loop: asyncio.AbstractEventLoop
    shutdown: Shutdown
    thread: threading.Thread
    exit_code: list[int]
    publisher: KvEventPublisher | None

    def ask_to_stop(self) -> None:
        """As a signal does. Twice: as a second signal does."""
        self.loop.call_soon_threadsafe(self.shutdown.ask)

    def stop(self, timeout_s: float = 60.0) -> int:
        """-> the exit code, once no thread of it is left."""
        if self.thread.is_alive():
            self.ask_to_stop()
        self.thread.join(timeout_s)
        assert not self.thread.is_alive(), "the server does not end"
        return self.exit_code[0]


@contextmanager
def running_server(
    *,
    http: dict[str, Any] | None = None,
    context_length: int = CONTEXT_LENGTH,
    overrides: dict[str, Override] | None = None,
    fake: bool = True,
    **fields: Any,
) -> Iterator[RunningServer]:
    """`http`: fields of HttpArgs; `fields`: of ServerArgs. Afterwards: idle, every page owned once, no thread left."""
    http_args = HttpArgs(**{"port": 0, "served_model_name": MODEL, "shutdown_timeout": 5.0, **(http or {})})
    model = fake_model_config(vocab_size=VOCAB_SIZE, context_length=context_length) if fake else None
    before = set(threading.enumerate())
    args = server_args(**fields)
    with (
        opened_publisher(http_args.kv_events_config, args.page_size) as publisher,
        overridden(args, fake=fake, model=model, **(overrides or {})) as container,
    ):
        parts = assemble(container, http_args.served_model_name, publisher)
        gc.freeze()  # so that it looks for no garbage among what other tests left; it thaws it at its end
        server = _started(parts, http_args, publisher)
        try:
            yield server
        finally:
            code = server.stop()
        assert code == 0
        parts.scheduler.check_integrity()
        container.runtime().check_integrity()
        ledger = parts.scheduler.ledger()
        assert not parts.scheduler.has_work()
        assert ledger["requests"] == ledger["cached_protected"] == 0, ledger
    left = [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]
    assert not left, f"threads left: {left}"


def _started(parts: Parts, args: HttpArgs, publisher: KvEventPublisher | None) -> RunningServer:
    listening = listen(args.host, args.port)
    ready = threading.Event()
    found: dict[str, Any] = {}
    exit_code: list[int] = []

    def run() -> None:
        async def main() -> int:
            found.update(loop=asyncio.get_running_loop(), shutdown=Shutdown())
            return await serve(parts, args, listening, is_ready, found["shutdown"])

        try:
            exit_code.append(asyncio.run(main()))
        finally:
            ready.set()

    def is_ready(url: str) -> None:
        found["url"] = url
        ready.set()

    thread = threading.Thread(target=run, name="server under test")
    thread.start()
    ready.wait()
    assert "url" in found, "the server did not start"
    return RunningServer(
        url=found["url"],
        parts=parts,
        loop=found["loop"],
        shutdown=found["shutdown"],
        thread=thread,
        exit_code=exit_code,
        publisher=publisher,
    )
