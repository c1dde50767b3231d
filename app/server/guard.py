"""Who may ask for what. Before any handler: keys, and what a web page of somebody else's must not do through a browser.

open    anyone: is the process alive, how is it doing, what does the interface look like
client  --api-key, when there is one
admin   --admin-api-key, when there is one, else --api-key: what ends others' requests or shows their prompts
"""

from __future__ import annotations

import hashlib
import hmac
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from app.config.http_args import HttpArgs, is_loopback
from app.server.openai_errors import forbidden, unauthorized

OPEN_PATHS = frozenset({"/", "/health", "/metrics", "/openapi.json"})
ADMIN_PATHS = frozenset(
    {"/flush_cache", "/abort_request", "/cache_state", "/hicache/storage-backend", "/clear_hicache_storage_backend"}
)


class Guard:
    """ASGI middleware. Raises ApiError for what is not allowed."""

    def __init__(self, app: ASGIApp, args: HttpArgs) -> None:
        self._app = app
        self._client_key = None if args.api_key is None else _digest(args.api_key)
        admin_key = args.admin_api_key or args.api_key
        self._admin_key = None if admin_key is None else _digest(admin_key)
        # Without a key nothing but the address protects a loopback server, and a browser on this machine can be led
        # to it under another name.
        self._local_only = args.is_loopback and args.api_key is None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._check(scope["path"], Headers(scope=scope))
        await self._app(scope, receive, send)

    def _check(self, path: str, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._local_only and not _is_local(host):
            raise forbidden("this server answers under this machine's own names only: give it --api-key to open it")
        origin = headers.get("origin")
        if origin is not None and _authority(origin) != host:
            raise forbidden("a page of another origin may not use this server")
        if path in OPEN_PATHS:
            return
        given = _digest(_bearer(headers))
        if path in ADMIN_PATHS:
            if self._admin_key is not None and not hmac.compare_digest(given, self._admin_key):
                if self._client_key is not None and hmac.compare_digest(given, self._client_key):
                    raise forbidden("this needs the admin API key")
                raise unauthorized()
        elif self._client_key is not None and not (
            hmac.compare_digest(given, self._client_key)
            | (self._admin_key is not None and hmac.compare_digest(given, self._admin_key))
        ):
            raise unauthorized()


def _digest(key: str) -> bytes:
    # Comparing digests takes the same time whatever the lengths.
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _bearer(headers: Headers) -> str:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _authority(origin: str) -> str | None:
    """Host and port of it; None of what is no address."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def _is_local(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name)
