"""A reply as server-sent events, which ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

Result = TypeVar("Result")


class Disconnected(Exception):
    """The client has gone: nobody is left to reply to."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns, unless the client goes away first: then it is cancelled and Disconnected raised.

    The request's body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Disconnected
    finally:
        await _cancelled(task)
        await _cancelled(watcher)


async def _disconnection(receive: Receive) -> None:
    message: Message = {"type": ""}
    while message["type"] != "http.disconnect":
        message = await receive()


async def _cancelled(task: asyncio.Future[Any]) -> None:
    """Cancel it if it is not done, and wait for its end."""
    if not task.done():
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class EventStream(Response):
    """Sends events as they come. `on_end` is called once, however the stream ends."""

    def __init__(self, events: AsyncIterator[bytes], headers: Mapping[str, str], on_end: Callable[[], None]) -> None:
        super().__init__(headers=headers, media_type="text/event-stream")
        del self.headers["content-length"]  # of the empty body that a Response begins with
        self.headers["cache-control"] = "no-cache"
        self.headers["x-accel-buffering"] = "no"  # a proxy must not hold events back
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send(send))
        except Disconnected:
            pass
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            if event:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
