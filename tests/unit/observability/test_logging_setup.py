"""Log lines: level, form, and the request they belong to."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
import structlog

from app.observability.logging import configure_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_json_is_one_object_a_line_with_level_time_and_request() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)

    with structlog.contextvars.bound_contextvars(request_id="r1"):
        structlog.get_logger("here").info("pages_evicted", num_pages=3)

    line = json.loads(stream.getvalue())
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "pages_evicted", "level": "info", "num_pages": 3, "request_id": "r1"}


def test_an_exception_stays_on_one_line_of_json() -> None:
    stream = io.StringIO()
    configure_logging("info", "json", stream)

    try:
        raise ValueError("bad")
    except ValueError:
        structlog.get_logger().exception("step_failed")

    assert stream.getvalue().count("\n") == 1
    assert json.loads(stream.getvalue())["exception"][0]["exc_value"] == "bad"


def test_lines_below_the_level_are_not_written() -> None:
    stream = io.StringIO()
    configure_logging("warning", "console", stream)

    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud", num_pages=3)

    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()
    assert "num_pages=3" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_stderr_is_the_default_and_a_later_setup_replaces_an_earlier(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("error", "json", io.StringIO())
    logger = structlog.get_logger()

    configure_logging("debug", "json")
    logger.debug("seen")

    shown = capsys.readouterr()
    assert shown.out == ""
    assert json.loads(shown.err)["event"] == "seen"
