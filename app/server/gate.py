"""Who may come in: as many requests as may wait, and none once the server shuts down."""

from __future__ import annotations

from app.server.engine_loop import EngineLoop
from app.server.openai_errors import not_allowed, queue_full, shutting_down


class Gate:
    def __init__(self, engine: EngineLoop, *, max_running: int, max_queued: int) -> None:
        self._engine = engine
        self._max_running = max_running
        self._max_queued = max_queued
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def check(self, num_requests: int) -> None:
        """ApiError if that many more cannot be taken: 429 with a full queue, 400 if never, 503 at shutdown."""
        if self._closed:
            raise shutting_down()
        most = self._max_running + self._max_queued
        if num_requests > most:
            raise not_allowed("n", f"{num_requests} choices in all", f"at most {most}: so many may run and wait")
        ahead = self._engine.num_requests
        if ahead + num_requests > most:
            raise queue_full(max(0, ahead - self._max_running), self._max_queued)

    def close(self) -> None:
        """Take nobody any more."""
        self._closed = True
