"""HTTP by hand, for clients that do what a library would not."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from tests.support.asking import PATIENCE_S

JSON = {"content-type": "application/json"}


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)


def head(path: str, headers: Mapping[str, str], method: str = "POST") -> bytes:
    """A request's first part, up to its body."""
    lines = [f"{method} {path} HTTP/1.1", "host: 127.0.0.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def post(url: str, path: str, asked: Mapping[str, Any]) -> socket.socket:
    """A connection on which a whole request was sent."""
    content = json.dumps(asked).encode()
    connection = connect(url)
    connection.sendall(head(path, {**JSON, "content-length": str(len(content))}) + content)
    return connection


def read_events(connection: socket.socket, count: int) -> bytes:
    """What has come once `count` events have begun."""
    received = b""
    while received.count(b"data: ") < count:
        piece = connection.recv(4096)
        assert piece, received
        received += piece
    return received


def read_reply(connection: socket.socket) -> tuple[int, bytes]:
    """-> status, and everything up to the end of the connection."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
    return int(received.split(b" ", 2)[1]), received
