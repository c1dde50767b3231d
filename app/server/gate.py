"""Who may come in: as many requests as may wait; none before the engine is ready or once the server shuts down."""

from __future__ import annotations

from app.server.engine_loop import EngineLoop
from app.server.openai_errors import ApiError, not_allowed, queue_full, shutting_down, starting


class Gate:
    def __init__(self, engine: EngineLoop, *, max_running: int, max_queued: int) -> None:
        self._engine = engine
        self._max_running = max_running
        self._max_queued = max_queued
        self._refusal: ApiError | None = starting()

    @property
    def refusal(self) -> ApiError | None:
        """What everybody is told: that the server is not ready yet, or that it shuts down. None while it serves."""
        return self._refusal

    def check(self, num_requests: int) -> None:
        """ApiError if that many more cannot be taken: 429 with a full queue, 400 if never, 503 if nobody is."""
        if self._refusal is not None:
            raise self._refusal
        most = self._max_running + self._max_queued
        if num_requests > most:
            raise not_allowed("n", f"{num_requests} choices in all", f"at most {most}: so many may run and wait")
        ahead = self._engine.num_requests
        if ahead + num_requests > most:
            raise queue_full(max(0, ahead - self._max_running), self._max_queued)

    def open(self) -> None:
        """The engine is ready."""
        self._refusal = None

    def close(self) -> None:
        """Take nobody any more."""
        self._refusal = shutting_down()
