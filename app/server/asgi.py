"""The application: which path is answered by which handler, and what every request passes through."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from app.config.http_args import HttpArgs
from app.observability.metrics import Metrics
from app.server.admin_routes import AdminRoutes
from app.server.generation import Generation
from app.server.guard import Guard
from app.server.health_routes import HealthRoutes
from app.server.openai_errors import ApiError, invalid_request, method_not_allowed, unknown_route
from app.server.openapi import document
from app.server.replies import error_response
from app.server.request_log import RequestLog
from app.server.storage_routes import StorageRoutes
from app.server.token_routes import TokenRoutes

Handler = Callable[[HttpRequest], Awaitable[Response]]

_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def make_app(
    *,
    args: HttpArgs,
    version: str,
    metrics: Metrics,
    generation: Generation,
    tokens: TokenRoutes,
    admin: AdminRoutes,
    health: HealthRoutes,
    storage: StorageRoutes,
) -> Starlette:
    page = files("app.server").joinpath("page.html").read_bytes()
    openapi = msgspec.json.encode(document(version))

    async def show_page(_http: HttpRequest) -> Response:
        return Response(page, headers=_PAGE_HEADERS, media_type="text/html")

    async def show_openapi(_http: HttpRequest) -> Response:
        return Response(openapi, media_type="application/json")

    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/completions", generation.completions),
        ("POST", "/v1/chat/completions", generation.chat),
        ("GET", "/v1/models", tokens.models),
        ("GET", "/v1/models/{model:path}", tokens.model),
        ("POST", "/tokenize", tokens.tokenize),
        ("POST", "/detokenize", tokens.detokenize),
        ("GET", "/health", health.health),
        ("GET", "/health_generate", health.generate),
        ("GET", "/metrics", health.metrics),
        ("GET", "/server_info", admin.server_info),
        ("GET", "/cache_state", admin.cache_state),
        ("POST", "/flush_cache", admin.flush),
        ("POST", "/abort_request", admin.abort),
        ("GET", "/hicache/storage-backend", storage.show),
        ("PUT", "/hicache/storage-backend", storage.attach),
        ("DELETE", "/hicache/storage-backend", storage.detach),
        ("POST", "/clear_hicache_storage_backend", storage.clear),
        ("GET", "/", show_page),
        ("GET", "/openapi.json", show_openapi),
    ]
    allowed: dict[str, list[str]] = {}
    for method, path, _ in routes:
        allowed.setdefault(path, []).append(method)

    def refused(error: ApiError) -> Response:
        metrics.refused(error.code or str(error.status))
        return error_response(error)

    async def unknown(http: HttpRequest, _error: Exception) -> Response:
        return refused(unknown_route(http.url.path))

    async def wrong_method(http: HttpRequest, _error: Exception) -> Response:
        methods = allowed.get(http.url.path, ["GET"])
        reply = refused(method_not_allowed(http.method, http.url.path, methods))
        reply.headers["allow"] = ", ".join(methods)
        return reply

    async def other(_http: HttpRequest, error: Exception) -> Response:
        return refused(invalid_request(str(error)))

    app = Starlette(
        routes=[Route(path, handler, methods=[method]) for method, path, handler in routes],
        middleware=[Middleware(RequestLog, metrics=metrics), Middleware(Guard, args=args)],
        exception_handlers={404: unknown, 405: wrong_method, HTTPException: other},
    )
    app.router.redirect_slashes = False  # a path that is nearly right is none: Starlette takes this nowhere else
    return app
