"""How the nodes of one engine find one another, and refuse to work together when they were told different things.

    node 0 listens at --dist-init-addr; the others connect:    Hello -->    <-- Welcome, or why not

Every node plans the same steps from the same settings. One that plans differently would hang the others, or worse.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from app.config.server_args import ServerArgs, flag_of
from app.errors import ConfigError

_RETRY_S = 0.1
_HELLO_S = 5.0
_MAX_HELLO_BYTES = 64 * 1024

Message = TypeVar("Message")
# What nodes may differ in. Each reads a copy of the model of its own.
_OWN_SETTINGS = ("node_rank", "model_path", "log_level", "log_format", "dist_timeout")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says when it comes."""

    node_rank: int
    version: str
    settings: dict[str, Any]


class Welcome(msgspec.Struct, frozen=True, kw_only=True):
    """Node 0's answer. `refusal` is empty if the node may stay."""

    refusal: str = ""


def hello_of(args: ServerArgs, version: str) -> Hello:
    settings = msgspec.to_builtins(args)
    return Hello(
        node_rank=args.node_rank,
        version=version,
        settings={name: value for name, value in settings.items() if name not in _OWN_SETTINGS},
    )


def address_of(args: ServerArgs) -> tuple[str, int]:
    """Host and port at which the nodes meet."""
    host, _, port = str(args.dist_init_addr).rpartition(":")
    return host.strip("[]"), int(port)


def meet(args: ServerArgs, version: str) -> dict[int, socket.socket]:
    """-> a connection to every follower, by rank, or on a follower to node 0. Waits for --dist-timeout at most.

    Raises ConfigError, on both sides, when nodes differ in a setting or in their version, and when one does not come.
    """
    own = hello_of(args, version)
    deadline = time.monotonic() + args.dist_timeout
    return _gather(args, own, deadline) if args.node_rank == 0 else {0: _connect(args, own, deadline)}


def _gather(args: ServerArgs, own: Hello, deadline: float) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as undo, _listen(args) as listening:
        while len(links) < args.nnodes - 1:
            link = _accept(args, listening, links, deadline)
            undo.callback(link.close)
            hello = _receive(link, Hello)
            if hello is None:
                link.close()  # not a node of ours
                continue
            if refusal := _refusal(own, hello, links):
                _send(link, Welcome(refusal=refusal))
                raise ConfigError(field="--nnodes", value=args.nnodes, allowed=refusal)
            _send(link, Welcome())
            links[hello.node_rank] = link
        undo.pop_all()
    return links


def _listen(args: ServerArgs) -> socket.socket:
    host, port = address_of(args)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        allowed = f"an address of node 0 whose port is free ({error.strerror or error})"
        raise ConfigError(field="--dist-init-addr", value=args.dist_init_addr, allowed=allowed) from error


def _accept(
    args: ServerArgs, listening: socket.socket, links: Mapping[int, socket.socket], deadline: float
) -> socket.socket:
    listening.settimeout(max(deadline - time.monotonic(), 0.001))
    try:
        return listening.accept()[0]
    except TimeoutError:
        missing = ", ".join(str(rank) for rank in range(1, args.nnodes) if rank not in links)
        allowed = f"nodes that all start within {args.dist_timeout} s; not seen: node {missing}"
        raise ConfigError(field="--nnodes", value=args.nnodes, allowed=allowed) from None


def _connect(args: ServerArgs, own: Hello, deadline: float) -> socket.socket:
    while True:
        try:
            link = socket.create_connection(address_of(args), timeout=_HELLO_S)
            break
        except OSError as error:
            if time.monotonic() >= deadline:
                allowed = f"where node 0 answers within {args.dist_timeout} s ({error.strerror or error})"
                raise ConfigError(field="--dist-init-addr", value=args.dist_init_addr, allowed=allowed) from error
            time.sleep(_RETRY_S)
    _send(link, own)
    welcome = _receive(link, Welcome)
    if welcome is None or welcome.refusal:
        link.close()
        said = "node 0 did not answer as one" if welcome is None else welcome.refusal
        raise ConfigError(field="--dist-init-addr", value=args.dist_init_addr, allowed=said)
    return link


def _refusal(own: Hello, other: Hello, links: Mapping[int, socket.socket]) -> str:
    """Why `other` cannot join; empty if it can."""
    rank = other.node_rank
    if own.version != other.version:
        return f"all nodes run one version; node 0 runs {own.version} and node {rank} {other.version}"
    for name, here in own.settings.items():
        there = other.settings.get(name)
        if here != there:
            return f"all nodes get the same {flag_of(name)}; node 0 has {here!r} and node {rank} {there!r}"
    if rank in links or not 1 <= rank < own.settings["nnodes"]:
        return f"every node has a --node-rank of its own; {rank} came twice"
    return ""


def _send(link: socket.socket, message: msgspec.Struct) -> None:
    with contextlib.suppress(OSError):  # the reader's silence tells
        link.sendall(msgspec.json.encode(message) + b"\n")


def _receive(link: socket.socket, kind: type[Message]) -> Message | None:
    """One line, or None for anything that is no such message within _HELLO_S. Takes no byte of what follows it."""
    deadline = time.monotonic() + _HELLO_S
    line = b""
    try:
        while not line.endswith(b"\n"):
            link.settimeout(max(deadline - time.monotonic(), 0.001))
            piece = link.recv(1)
            if not piece or len(line) > _MAX_HELLO_BYTES:
                return None
            line += piece
        return msgspec.json.decode(line, type=kind)
    except (OSError, msgspec.DecodeError):
        return None
