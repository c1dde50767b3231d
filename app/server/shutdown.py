"""The wish to end a server: asked once it is granted politely, asked twice at once."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from app.server.engine_loop import EngineLoop
from app.server.openai_errors import shutting_down


class Shutdown:
    """On the event loop's thread."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._hurried = asyncio.Event()

    def ask(self) -> None:
        if self._asked.is_set():
            self._hurried.set()
        self._asked.set()

    async def asked(self) -> None:
        await self._asked.wait()

    async def drain(self, engine: EngineLoop, timeout_s: float) -> None:
        """Let the engine's requests finish, and what moves between tiers, within the time, or until asked again.

        Then end the requests, each with a reply.
        """
        drained = asyncio.ensure_future(engine.wait_until_drained())
        hurried = asyncio.ensure_future(self._hurried.wait())
        await asyncio.wait({drained, hurried}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for waiting in (drained, hurried):
            waiting.cancel()
            with suppress(asyncio.CancelledError):
                await waiting
        engine.abort_matching(lambda _: True, shutting_down())
        await engine.wait_until_idle()
