"""What breaks: a device failure costs the requests that ran; a bug of ours ends the server, with an answer to all."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from app.config.http_args import HttpArgs
from app.providers.testing import overridden
from app.server.assembly import Parts, assemble
from app.server.engine_loop import EngineLoop
from app.server.run import listen, serve
from app.server.shutdown import Shutdown
from app.tpu.cpu_fake import fake_model_config
from app.tpu.failing_runner import FailingRunner, InjectedFailure
from tests.support.asking import COMPLETIONS, Asker, body, error_of, text_of, wait_until
from tests.support.engine import CONTEXT_LENGTH, VOCAB_SIZE, cold_tokens, server_args
from tests.support.paced_model import HeldRunner, model_runner
from tests.support.server import MODEL, running_server

PROMPT = [*range(20)]
FAILING_STEP = 12  # of those that the model is asked for, the server's own test of itself included


@pytest.mark.parametrize("at_dispatch", [True, False], ids=["at dispatch", "while it runs"])
def test_a_device_failure_costs_the_running_requests_and_the_server_serves_on(at_dispatch: bool) -> None:
    model = HeldRunner()
    failing = FailingRunner(model, InjectedFailure(step=FAILING_STEP, at_dispatch=at_dispatch))
    with running_server(overrides=model_runner(failing)) as server, Asker(server.url) as asker:
        # given: one of each kind
        with ThreadPoolExecutor(2) as pool:
            model.hold()
            whole = pool.submit(asker.refused, prompt=PROMPT, max_tokens=60)
            streamed = pool.submit(asker.http.post, COMPLETIONS, json=body(prompt=[9], max_tokens=60, stream=True))
            wait_until(lambda: asker.info()["num_requests"] == 2)

            # when
            model.release()

            # then
            status, error = whole.result()
            assert (status, error["code"], error["type"]) == (503, "device_failure", "server_error")
            assert '"code":"device_failure"' in streamed.result().text
            assert streamed.result().text.count("[DONE]") == 1
        assert asker.http.get("/health").status_code == 200
        assert asker.metrics()["tpukv:requests_refused_total{code=device_failure}"] == 2
        again = asker.whole(prompt=PROMPT, max_tokens=30)
        assert again.cached_tokens == 0  # nothing of the lost pool is believed
        assert again.choice.text == text_of(cold_tokens(np.array(PROMPT, np.int32), 30))
        assert asker.cached_tokens(PROMPT) == 16


class Breaking:
    """A scheduler's step that goes wrong after a number of calls, as a bug of ours would."""

    def __init__(self, step: Callable[[], Any], calls: int) -> None:
        self._step = step
        self._left = calls

    def __call__(self) -> Any:
        self._left -= 1
        if self._left < 0:
            raise AssertionError("a bug of ours")
        return self._step()


def with_broken_engine(
    monkeypatch: pytest.MonkeyPatch, calls: int, use: Callable[[Parts, HttpArgs], Awaitable[Any]]
) -> Any:
    """What `use` returns of a server's parts whose engine breaks at that call of step."""
    model = fake_model_config(vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    args = HttpArgs(port=0, served_model_name=MODEL)
    with overridden(server_args(max_running_requests=2), fake=True, model=model) as container:
        parts = assemble(container, MODEL)
        monkeypatch.setattr(parts.scheduler, "step", Breaking(parts.scheduler.step, calls))

        async def main() -> Any:
            return await use(parts, args)

        return asyncio.run(main())


def test_a_broken_engine_answers_everybody_and_ends_the_server_with_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(parts: Parts, args: HttpArgs) -> tuple[int, list[httpx.Response]]:
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(parts, args, listen(args.host, 0), ready.set_result, Shutdown()))
        async with httpx.AsyncClient(base_url=await ready, trust_env=False) as client:
            asked = [body(prompt=[number], max_tokens=100, stream=number % 2 == 1) for number in range(6)]
            replies = await asyncio.gather(*(client.post(COMPLETIONS, json=each) for each in asked))
        return await serving, replies

    code, replies = with_broken_engine(monkeypatch, 40, use)

    assert code == 1
    for number, reply in enumerate(replies):
        if number % 2:
            assert reply.text.count('"code":"engine_failed"') == reply.text.count("[DONE]") == 1
        else:
            assert (reply.status_code, error_of(reply)["code"]) == (503, "engine_failed")


def test_while_a_server_with_a_broken_engine_lives_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it does for as long as connections are being closed."""

    async def use(parts: Parts, args: HttpArgs) -> tuple[BaseException | None, int, list[httpx.Response]]:
        failures: list[None] = []
        engine = EngineLoop(
            parts.scheduler, parts.adapter, parts.watch, queue_timeout_s=60, on_failure=lambda: failures.append(None)
        )
        gate, texts, app = parts.make_app(engine, args, "0")
        engine.start()
        gate.open()
        async with httpx.AsyncClient(base_url="http://127.0.0.1", transport=httpx.ASGITransport(app)) as client:
            replies = [await client.post(COMPLETIONS, json=body(prompt="x", max_tokens=100))]
            for method, path in (
                ("POST", COMPLETIONS),
                ("POST", "/flush_cache"),
                ("GET", "/health"),
                ("GET", "/health_generate"),
                ("GET", "/cache_state"),
            ):
                json = body(prompt="x") if path == COMPLETIONS else None
                replies.append(await client.request(method, path, json=json))
            metrics = await client.get("/metrics")
        await engine.stop()
        texts.close()
        assert metrics.status_code == 200
        return engine.failure, len(failures), replies

    failure, told, replies = with_broken_engine(monkeypatch, 5, use)

    assert isinstance(failure, AssertionError)
    assert told == 1
    assert [(reply.status_code, error_of(reply)["code"]) for reply in replies] == [(503, "engine_failed")] * 6


def test_a_server_whose_engine_breaks_at_the_start_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    ready: list[str] = []

    async def use(parts: Parts, args: HttpArgs) -> int:
        return await serve(parts, args, listen(args.host, 0), ready.append, Shutdown())

    with pytest.raises(Exception, match="engine has failed"):
        with_broken_engine(monkeypatch, 0, use)
    assert not ready
