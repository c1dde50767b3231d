"""Sends a workload to a server: once to warm it up, once to measure it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.bench.serve.client import StreamingClient
from app.bench.serve.conversation import Workload
from app.bench.serve.driver import Driver, LoopLag, Sent
from app.bench.serve.failures import BenchServerError
from app.bench.serve.result import Ending
from app.bench.serve.server_api import ServerApi
from app.bench.serve.settings import Target

if TYPE_CHECKING:
    import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """sent: in the order of sending. began: on the clock of their times. loop_lag_s: the client's own, the largest."""

    sent: list[Sent]
    began: float
    ending: Ending
    loop_lag_s: float


class Measuring:
    """Both passes send the same, at the same times, and no more than `concurrency` conversations at once."""

    def __init__(
        self, *, http: httpx.AsyncClient, api: ServerApi, target: Target, model: str, concurrency: int
    ) -> None:
        self._http = http
        self._api = api
        self._target = target
        self._model = model
        self._concurrency = concurrency

    async def warm_up(self, workload: Workload, arrivals: Sequence[float | None]) -> list[Sent]:
        """Send everything under a salt of its own, so that the server meets every shape that will be measured and
        keeps nothing that could be reused; then empty its cache.

        Raises BenchServerError when the server goes away or cannot be emptied.
        """
        driver = self._driver(cache_salt=secrets.token_hex(16))
        if not await driver.run(workload.conversations, arrivals):
            raise BenchServerError(url=self._target.url, reason="went away during the warm-up; nothing was measured")
        await self._api.flush()
        return driver.sent()

    async def measure(self, workload: Workload, arrivals: Sequence[float | None]) -> Measured:
        """A run that is cancelled, or whose server goes away, returns what there is and says so in `ending`."""
        driver = self._driver(cache_salt=None)
        lag = LoopLag(now=time.perf_counter, sleep=asyncio.sleep)
        watching = asyncio.create_task(lag.watch())
        began = time.perf_counter()
        ending: Ending = "server gone"
        try:
            if await driver.run(workload.conversations, arrivals):
                ending = "complete"
        except asyncio.CancelledError:  # not passed on: the caller saves what there is, then ends
            ending = "interrupted"
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        return Measured(sent=driver.sent(), began=began, ending=ending, loop_lag_s=lag.largest_s)

    def _driver(self, *, cache_salt: str | None) -> Driver:
        client = StreamingClient(
            http=self._http,
            now=time.perf_counter,
            model=self._model,
            timeout_s=self._target.timeout,
            cache_salt=cache_salt,
        )
        return Driver(
            send=client.send,
            answers=self._api.answers,
            now=time.perf_counter,
            sleep=asyncio.sleep,
            concurrency=self._concurrency,
        )
