"""The server answers, streams, and ends cleanly."""

from __future__ import annotations

import httpx

from tests.support.server import MODEL, running_server


def test_a_completion_is_answered_whole_and_as_a_stream() -> None:
    with running_server() as server:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        whole = httpx.post(f"{server.url}/v1/completions", json=body).json()
        streamed = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": True}).text
        assert whole["usage"]["completion_tokens"] == 6
        assert streamed.endswith("data: [DONE]\n\n")
