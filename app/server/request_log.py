"""One log line for each request, and an error body for whatever goes wrong below."""

from __future__ import annotations

import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.observability.metrics import Metrics
from app.server.event_stream import Disconnected
from app.server.openai_errors import ApiError, internal_error
from app.server.replies import error_response

_log = structlog.get_logger(__name__)


class RequestLog:
    """ASGI middleware, the outermost: log lines of one request share its context variables."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status: int | None = None

        async def noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(method=scope["method"], path=scope["path"])
        try:
            await self._app(scope, receive, noting_status)
        except Disconnected:
            _log.info("client_disconnected", after_s=round(time.monotonic() - began, 3))
            return
        except ApiError as error:
            self._metrics.refused(error.code or str(error.status))
            _log.info("request_refused", status=error.status, code=error.code, reason=error.message)
            await error_response(error)(scope, receive, noting_status)
        except Exception as error:  # a bug of ours; the client is told that and no more
            self._metrics.refused("internal_error")
            _log.exception("request_failed", error=repr(error))
            if status is not None:
                raise
            await error_response(internal_error())(scope, receive, noting_status)
        # Pages and scrapers ask every second; what they get is not worth a line.
        log = _log.debug if scope["method"] == "GET" and status == 200 else _log.info
        log("request_served", status=status, seconds=round(time.monotonic() - began, 3))
