"""A server that still compiles its programs: it says so, takes no request, and can be stopped."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from app.config.http_args import HttpArgs
from app.providers.testing import overridden
from app.server.assembly import assemble
from app.server.run import listen, serve
from app.server.shutdown import Shutdown
from app.tpu.cpu_fake import fake_model_config
from tests.support.asking import CHAT, COMPLETIONS, body, error_of
from tests.support.engine import VOCAB_SIZE, server_args
from tests.support.paced_model import HeldRunner, model_runner
from tests.support.server import MODEL

Told = list[tuple[str, float]]
Use = Callable[[httpx.AsyncClient, asyncio.Future[str], Shutdown], Awaitable[None]]


def while_starting(runner: HeldRunner, use: Use, **fields: Any) -> tuple[int, Told]:
    """Serve with a held model, whose first step never ends by itself. -> the exit code, and what was told."""
    told: Told = []

    async def main() -> int:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        shutdown, listening = Shutdown(), listen("127.0.0.1", 0)
        host, port = listening.getsockname()
        serving = asyncio.create_task(
            serve(parts, HttpArgs(port=0), listening, ready.set_result, shutdown, lambda *step: told.append(step))
        )
        async with httpx.AsyncClient(base_url=f"http://{host}:{port}", trust_env=False) as client:
            await use(client, ready, shutdown)
        shutdown.ask()
        return await serving

    model = fake_model_config(vocab_size=VOCAB_SIZE, context_length=128)
    with overridden(server_args(**fields), fake=True, model=model, **model_runner(runner)) as container:
        parts = assemble(container, MODEL)
        runner.hold()
        code = asyncio.run(main())
        container.runtime().check_integrity()
    return code, told


def test_it_says_that_it_starts_and_takes_requests_once_it_has_started() -> None:
    runner = HeldRunner()

    async def use(client: httpx.AsyncClient, ready: asyncio.Future[str], _shutdown: Shutdown) -> None:
        await asyncio.to_thread(runner.wait_until_stuck)
        for method, path in (("GET", "/health"), ("GET", "/health_generate"), ("POST", COMPLETIONS), ("POST", CHAT)):
            reply = await client.request(method, path, json=body(prompt="x") if method == "POST" else None)
            assert (reply.status_code, error_of(reply)["code"]) == (503, "starting")
            assert int(reply.headers["retry-after"]) > 0
        for path in ("/v1/models", "/metrics", "/"):
            assert (await client.get(path)).status_code == 200
        assert not ready.done()
        assert not gc.get_freeze_count()

        runner.release()
        await ready
        assert gc.get_freeze_count()  # what is there by now is looked at no more
        assert (await client.get("/health")).status_code == 200
        assert (await client.post(COMPLETIONS, json=body(prompt="x"))).status_code == 200

    code, told = while_starting(runner, use, warmup="decode")

    assert code == 0
    assert not gc.get_freeze_count()
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert [what for what, _ in told if "decode, 4 rows, 32 pages" in what]
    assert told[-1] == ("a first token", 1.0)


def test_it_can_be_stopped_before_it_has_started() -> None:
    runner = HeldRunner()

    async def use(_client: httpx.AsyncClient, ready: asyncio.Future[str], shutdown: Shutdown) -> None:
        await asyncio.to_thread(runner.wait_until_stuck)
        shutdown.ask()
        await asyncio.sleep(0)
        runner.release()

    code, told = while_starting(runner, use, warmup="all")

    assert code == 0
    assert len(told) < 10  # of a hundred programs and more
