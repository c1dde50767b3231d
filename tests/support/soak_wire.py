"""One HTTP connection in hand: what is sent byte by byte, and replies read at any pace. To 127.0.0.1 only."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import h11

HOST = "127.0.0.1"
Pause = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes


class Wire:
    """Bytes out as they are, replies in through h11. `reply` may be called as often as requests were sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._ahead = b""  # read already, of the next reply

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def reply(self, *, method: str = "POST", read_size: int = 65536, pause: Pause | None = None) -> Reply:
        """The next reply. pause: awaited once its head is there, before anything else is read."""
        parser = h11.Connection(h11.CLIENT)
        parser.send(h11.Request(method=method, target="/", headers=[("host", HOST)]))
        parser.send(h11.EndOfMessage())
        if self._ahead:  # to h11 an empty piece is the end of the connection
            parser.receive_data(self._ahead)
        status, headers, body = 0, {}, bytearray()
        while True:
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(await self._reader.read(read_size))
            elif isinstance(event, h11.Response):
                status = event.status_code
                headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
                if pause is not None:
                    await pause()
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self._ahead = parser.trailing_data[0]
                return Reply(status=status, headers=headers, body=bytes(body))
            elif isinstance(event, h11.ConnectionClosed):
                raise ConnectionError(f"closed after {bytes(body)!r}")

    async def some(self, num_bytes: int) -> bytes:
        """What is there, at most so much, once there is something. b"" at the end."""
        return await self._reader.read(num_bytes)

    async def rest(self) -> bytes:
        """All until the server closes."""
        return await self._reader.read()

    def end_sending(self) -> None:
        self._writer.write_eof()

    def reset(self) -> None:
        """End it as a process that dies does: without a farewell."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()


@asynccontextmanager
async def connected(port: int, *, receive_buffer: int | None = None, read_ahead: int = 65536) -> AsyncIterator[Wire]:
    """A connection, closed at the end. receive_buffer: bytes the system keeps; read_ahead: those this side keeps."""
    link = socket.socket()
    if receive_buffer is not None:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    link.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(link, (HOST, port))
        reader, writer = await asyncio.open_connection(sock=link, limit=read_ahead)
    except BaseException:
        link.close()
        raise
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with suppress(OSError):  # it was reset, by this side or by the server
            await writer.wait_closed()


def head(method: str, path: str, *fields: str) -> bytes:
    """The first lines of a request; `fields` are whole header lines."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {HOST}", *fields, "", ""]).encode("latin-1")


def post(path: str, body: bytes, content_type: str = "application/json") -> bytes:
    """A whole request."""
    return head("POST", path, f"Content-Type: {content_type}", f"Content-Length: {len(body)}") + body


def chunk(data: bytes) -> bytes:
    """A piece of a body without a length; the empty one ends it."""
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"
