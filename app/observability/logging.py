"""Log lines of this process: structured, to stderr, for people or for machines.

An event is a past verb in a fixed word, with its data as keys. A request's id comes from context variables: whoever
works for one request binds it with `structlog.contextvars.bound_contextvars(request_id=...)`.
"""

from __future__ import annotations

import logging
import sys
from typing import Literal, TextIO

import structlog


def configure_logging(
    level: Literal["debug", "info", "warning", "error"],
    fmt: Literal["console", "json"],
    stream: TextIO | None = None,
) -> None:
    """Set up structlog for the whole process. `stream` defaults to what stderr is now. Call again to change it."""
    target = sys.stderr if stream is None else stream
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *_rendering(fmt, target),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(target),
        # A cached logger would keep the settings, and the stream, of the first call.
        cache_logger_on_first_use=False,
    )


def _rendering(fmt: Literal["console", "json"], target: TextIO) -> list[structlog.typing.Processor]:
    # Without the values of local variables: they may be keys and prompts.
    if fmt == "json":
        transformer = structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        return [structlog.processors.ExceptionRenderer(transformer), structlog.processors.JSONRenderer()]
    return [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback)]
