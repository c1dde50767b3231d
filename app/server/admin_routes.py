"""What an operator asks: what is served and why, what is in the cache; and to flush it or to end requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.errors import LockedPageError
from app.scheduling.scheduler import Scheduler
from app.server.cache_state import CacheSnapshot, ServerFacts, cache_state
from app.server.engine_loop import EngineLoop
from app.server.engine_watch import EngineWatch
from app.server.event_stream import unless_disconnected
from app.server.health_routes import is_probe
from app.server.http_body import BodyReader
from app.server.openai_errors import conflict
from app.server.replies import json_response
from app.server.schemas import AbortRequest, FlushRequest
from app.server.served import Served
from app.server.served_tiers import ServedTiers
from app.server.texts import Texts

_RETRY_S = 0.05


class AdminRoutes:
    def __init__(
        self,
        *,
        engine: EngineLoop,
        scheduler: Scheduler,
        watch: EngineWatch,
        served: Served,
        bodies: BodyReader,
        texts: Texts,
        snapshot: Callable[[], CacheSnapshot],
        tiers: ServedTiers | None,
    ) -> None:
        """`scheduler` and `snapshot` are called on the engine's thread alone."""
        self._engine = engine
        self._scheduler = scheduler
        self._watch = watch
        self._served = served
        self._bodies = bodies
        self._texts = texts
        self._snapshot = snapshot
        self._tiers = tiers
        self._facts = ServerFacts(
            model=served.model,
            cache_type=served.facts["cache_type"],
            cache_type_reason=served.facts["cache_type_reason"],
            device_tier=f"device: {served.facts['device']}",
        )
        self._started = time.monotonic()

    async def server_info(self, _http: HttpRequest) -> Response:
        return json_response(
            {
                "model": self._served.model,
                "uptime_s": round(time.monotonic() - self._started, 3),
                **self._served.facts,
                "num_requests": self._engine.num_requests,
                "num_running": self._watch.num_running,
                "num_waiting": self._watch.num_waiting,
                "generated_tokens": self._watch.num_tokens,
                **({} if self._tiers is None else {"tiers": await self._tiers.state()}),
            }
        )

    async def cache_state(self, _http: HttpRequest) -> Response:
        snapshot = await self._engine.ask(self._snapshot)
        uptime_s = time.monotonic() - self._started
        return json_response(
            await self._texts.run(
                lambda: cache_state(snapshot, facts=self._facts, uptime_s=uptime_s, text_of=self._texts.preview)
            )
        )

    async def flush(self, http: HttpRequest) -> Response:
        """All or nothing: refused with 409 while a request reads a cached page, after waiting as long as asked."""
        request = (await self._bodies.read_optional(http, FlushRequest)).request
        pages = await unless_disconnected(http.receive, self._flushed(request.timeout))
        return json_response({"flushed_pages": pages})

    async def _flushed(self, timeout_s: float) -> int:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return await self._engine.ask(self._scheduler.flush_cache)
            except LockedPageError:
                if time.monotonic() >= deadline:
                    raise conflict(
                        f"{self._engine.num_requests} requests are being served and read cached pages: nothing was "
                        "flushed; try again when they have ended, or send a longer timeout"
                    ) from None
                await asyncio.sleep(_RETRY_S)

    async def abort(self, http: HttpRequest) -> Response:
        """Ends a request by the id in its reply, or all. Ids that are unknown, or ended already, are no error."""
        request = (await self._bodies.read(http, AbortRequest)).request
        rid = request.rid
        aborted = self._engine.abort_matching(
            # A choice's id is that of its reply and the choice's number.
            lambda request_id: (
                (request.abort_all and not is_probe(request_id)) or rid in (request_id, request_id.rpartition("-")[0])
            ),
            None,
        )
        return json_response({"aborted": aborted})
