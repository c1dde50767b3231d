"""One client's connection: uvicorn's, but for clients that send no request at all, or something else."""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from app.server.openai_errors import invalid_request

# For the head of a request: nothing else ends a connection on which it never comes whole.
HEAD_TIMEOUT_S = 30.0


class Connection(H11Protocol):
    """Ends after a time without a request; says in OpenAI's form what it cannot read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._last_look: tuple[bool, object] = (True, None)
        self._next_look = self.loop.call_later(HEAD_TIMEOUT_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._next_look.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Bytes that are no HTTP. After an answer that went out before its request was here, nothing can be said."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its handler may be yet to begin: this is the answer, and the only one
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = invalid_request("what was sent cannot be read as an HTTP request", code="invalid_http").body()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(body))),
                ("connection", "close"),
            ]
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _look(self) -> None:
        """Once in a while: is a request waited for, and the same one as the last time?"""
        look = self.conn.their_state is h11.IDLE, self.cycle
        if look == self._last_look and look[0]:
            self.timeout_keep_alive_handler()
            return
        self._last_look = look
        self._next_look = self.loop.call_later(HEAD_TIMEOUT_S, self._look)
