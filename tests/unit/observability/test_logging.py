"""Log lines: one each, in the form asked for, without secrets."""

from __future__ import annotations

import io
import json
from typing import Literal

import pytest
import structlog

from app.observability.logging import configure_logging


@pytest.mark.parametrize("fmt", ["console", "json"])
def test_a_traceback_shows_no_values_of_local_variables(fmt: Literal["console", "json"]) -> None:
    """They may be keys and prompts: headers, bodies, tokens."""
    stream = io.StringIO()
    configure_logging("info", fmt, stream)
    key = "-".join(["secret", "of", "a", "client"])  # not to be found in the source lines that a traceback shows

    def fail(_authorization: str) -> None:
        raise ValueError("broken")

    try:
        fail(key)
    except ValueError:
        structlog.get_logger().exception("request_failed")

    assert "ValueError" in stream.getvalue()
    assert key not in stream.getvalue()


def test_json_lines_are_one_object_each() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)

    structlog.get_logger().info("pages_evicted", num_pages=3, text="a\nb")
    structlog.get_logger().debug("not_shown")

    (line,) = stream.getvalue().splitlines()
    shown = json.loads(line)
    assert (shown["event"], shown["num_pages"], shown["text"], shown["level"]) == ("pages_evicted", 3, "a\nb", "info")
