"""Whether the process lives, whether it produces tokens, and its figures."""

from __future__ import annotations

import asyncio
import uuid

import numpy as np
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.core.sampling import SamplingParams
from app.observability.metrics import CONTENT_TYPE, Metrics
from app.scheduling.request import Request
from app.server.engine_loop import EngineLoop
from app.server.engine_watch import EngineWatch
from app.server.gate import Gate
from app.server.openai_errors import engine_failed, no_token
from app.server.replies import json_response
from app.server.served_tiers import ServedTiers

GENERATE_TIMEOUT_S = 30.0
_POLL_S = 0.05
_PROBE = "health_"
_FIRST = -(2**31)  # before whatever else waits


def is_probe(request_id: str) -> bool:
    """Whether it is a request of the server's own, of which no client knows."""
    return request_id.startswith(_PROBE)


class HealthRoutes:
    def __init__(
        self, *, engine: EngineLoop, watch: EngineWatch, gate: Gate, metrics: Metrics, tiers: ServedTiers | None
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._gate = gate
        self._metrics = metrics
        self._tiers = tiers

    async def health(self, _http: HttpRequest) -> Response:
        """200 while the process serves; 503 before and after."""
        if self._engine.failure is not None:
            raise engine_failed()
        if self._gate.refusal is not None:
            raise self._gate.refusal
        return json_response({"status": "ok"})

    async def generate(self, _http: HttpRequest) -> Response:
        """200 once a token was produced after the question: for a request of its own, or for others when all rows are
        taken. Puts nothing into the cache: its prompt is one token.
        """
        if self._gate.refusal is not None:  # a full queue is no sign of illness
            raise self._gate.refusal
        before = self._watch.num_tokens
        probe = Request(
            request_id=f"{_PROBE}{uuid.uuid4().hex}",
            prompt_token_ids=np.zeros(1, np.int32),
            sampling=SamplingParams(max_tokens=1, ignore_eos=True),
            priority=_FIRST,
        )
        mailbox = self._engine.submit([probe])
        own = asyncio.ensure_future(mailbox.wait_for_all())
        try:
            async with asyncio.timeout(GENERATE_TIMEOUT_S):
                while not own.done() and self._watch.num_tokens == before:
                    await asyncio.wait({own}, timeout=_POLL_S)
                if own.done() and not (await own)[0].token_ids:
                    raise no_token(GENERATE_TIMEOUT_S)  # it was aborted
        except TimeoutError:
            raise no_token(GENERATE_TIMEOUT_S) from None
        finally:
            own.cancel()
            self._engine.abort(mailbox)
        return json_response({"status": "ok"})

    async def metrics(self, _http: HttpRequest) -> Response:
        if self._tiers is not None:
            await self._tiers.refresh()
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})
