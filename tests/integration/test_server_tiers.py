"""A server whose cache has tiers below it: usage by tier, and what moves while nobody asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from app.config.http_args import HttpArgs
from app.core.sampling import SamplingParams
from app.providers.testing import overridden
from app.scheduling.request import Request
from app.server.assembly import assemble
from app.server.engine_loop import EngineLoop
from app.server.shutdown import Shutdown
from tests.support.engine import Engine, server_args
from tests.support.scripted_tiers import TIERED_CACHE, TieredEngine, with_copies

PROMPT = [*range(1, 33)]
NEVER = 10**9  # steps


@dataclass
class Site:
    """An engine loop at work, what is below it, and a client of its application."""

    loop: EngineLoop
    rig: TieredEngine
    client: httpx.AsyncClient

    async def answer(self, **fields: Any) -> dict[str, Any]:
        reply = await self.client.post("/v1/completions", json={"model": "fake", "max_tokens": 1, **fields})
        assert reply.status_code == 200, reply.text
        return dict(reply.json()["usage"]["prompt_tokens_details"])

    async def host(self, tokens: list[int]) -> None:
        """These are on the host, and on the device no more."""
        await self.answer(prompt=[*tokens, 0])

        def move() -> int:
            self.rig.back_up(tokens)
            return self.rig.engine.container.tree_cache().flush()

        assert await self.loop.ask(move)

    async def leave_a_restore(self) -> None:
        """Begin one for a request that is then given up. It lands when `land` is told so, however slow this machine."""
        self.rig.copies.steps_to_land = NEVER
        request = Request(
            request_id="gone", prompt_token_ids=np.array([*PROMPT, 7], np.int32), sampling=SamplingParams(max_tokens=1)
        )
        mailbox = self.loop.submit([request])
        while not await self.loop.ask(lambda: bool(self.rig.tiers.in_flight)):
            await asyncio.sleep(0)
        self.loop.abort(mailbox)
        (output,) = await mailbox.wait_for_all()
        assert output.finish_reason == "abort"

    async def land(self, steps: int) -> None:
        """What moves lands after so many more steps."""

        def begin() -> None:
            self.rig.copies.waits.clear()
            self.rig.copies.land_after(steps)

        await self.loop.ask(begin)


def at_a_site(use: Callable[[Site], Awaitable[None]]) -> None:
    async def run() -> None:
        with overridden(server_args(), fake=True, **TIERED_CACHE) as container:
            parts = assemble(container, "fake")
            engine = Engine(container, parts.scheduler, container.runtime(), parts.adapter, server_args())
            loop = EngineLoop(parts.scheduler, parts.adapter, parts.watch, queue_timeout_s=60, on_failure=lambda: None)
            gate, texts, app = parts.make_app(loop, HttpArgs(), "0")
            loop.start()
            gate.open()
            try:
                async with httpx.AsyncClient(
                    base_url="http://127.0.0.1", transport=httpx.ASGITransport(app), timeout=None
                ) as client:
                    await use(Site(loop, with_copies(engine), client))
            finally:
                await loop.stop()
                texts.close()
            assert loop.failure is None
            parts.scheduler.check_integrity()

    asyncio.run(run())


def test_usage_tells_what_came_from_which_tier() -> None:
    async def use(site: Site) -> None:
        await site.host(PROMPT)
        await site.answer(prompt=[*PROMPT[:16], 0])

        details = await site.answer(prompt=[*PROMPT, 7], n=2, return_cached_tokens_details=True)

        assert details == {"cached_tokens": 32, "cached_tokens_details": {"device": 16, "host": 16, "storage": 0}}

    at_a_site(use)


def test_a_server_without_requests_goes_on_with_what_moves() -> None:
    async def use(site: Site) -> None:
        # given
        await site.host(PROMPT)
        await site.leave_a_restore()
        await site.land(10)

        # when
        await site.loop.wait_until_drained()

        # then: it landed, in plans that waited for nothing and were as many as it took, or one more, then under way
        assert not site.rig.tiers.in_flight
        assert (await site.answer(prompt=[*PROMPT, 8]))["cached_tokens"] == 32
        assert len(site.rig.copies.waits) in (10, 11)

    at_a_site(use)


def test_whoever_asks_meanwhile_is_answered() -> None:
    """What never ends keeps neither questions nor requests waiting, nor the end of the server."""

    async def use(site: Site) -> None:
        # given
        await site.host(PROMPT)
        await site.leave_a_restore()

        # then
        assert await site.loop.ask(site.rig.engine.scheduler.has_background_work)
        assert (await site.answer(prompt=[200, 201, 202]))["cached_tokens"] == 0
        await Shutdown().drain(site.loop, timeout_s=0.05)
        assert await site.loop.ask(site.rig.engine.scheduler.has_background_work)

    at_a_site(use)


def test_a_server_that_stops_lets_what_moves_come_to_its_end() -> None:
    async def use(site: Site) -> None:
        # given
        await site.host(PROMPT)
        await site.leave_a_restore()
        await site.land(10)

        # when
        await Shutdown().drain(site.loop, timeout_s=300)

        # then
        assert not site.rig.engine.scheduler.has_background_work()

    at_a_site(use)
