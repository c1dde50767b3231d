"""One server from start to end: engine thread, HTTP, signals.

With the model loaded it answers, but takes requests only once the engine is ready: programs are compiled, and a token
was produced. Until then /health and whoever asks for tokens get 503.

At SIGINT or SIGTERM: take nobody more (503); let running requests finish within --shutdown-timeout; end the rest, each
with a reply; then close connections and the engine's thread. A second signal skips the waiting.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from importlib.metadata import version

import numpy as np
import uvicorn

from app.config.http_args import HttpArgs
from app.core.sampling import SamplingParams
from app.errors import ConfigError
from app.scheduling.request import Request
from app.server.assembly import Parts
from app.server.connection import Connection
from app.server.engine_loop import EngineLoop
from app.server.shutdown import Shutdown

# For replies that are on their way when their requests have ended; a client that does not read them is cut off then.
_CLOSING_S = 5


class _HttpServer(uvicorn.Server):
    """Leaves signals alone: they ask for a `Shutdown`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. ConfigError naming --host or --port for an address that cannot be had."""
    try:
        [(family, _, _, _, address), *_] = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(field="--host", value=host, allowed=f"an address of this machine ({error})") from error
    # The protocol is named, which `socket.create_server` does not do: asyncio sends at once only on such sockets.
    try:
        listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    except OSError as error:
        raise ConfigError(field="--host", value=host, allowed=f"an address of this machine ({error})") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address[0], port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRNOTAVAIL:
            raise ConfigError(field="--host", value=host, allowed=f"an address of this machine ({reason})") from error
        raise ConfigError(field="--port", value=port, allowed=f"a port that is free on {host} ({reason})") from error
    return listening


Told = Callable[[str, float], None]
"""What is being done, and the fraction done."""


def run(
    parts: Parts, args: HttpArgs, listening: socket.socket, ready: Callable[[str], None], told: Told = lambda *_: None
) -> int:
    """Serve until a signal comes. -> 0, or 1 if the engine broke. `ready` is given the server's address, once.

    told: of what is compiled, until then.
    """

    async def until_signalled() -> int:
        shutdown = Shutdown()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, shutdown.ask)
        return await serve(parts, args, listening, ready, shutdown, told)

    return asyncio.run(until_signalled())


async def serve(
    parts: Parts,
    args: HttpArgs,
    listening: socket.socket,
    ready: Callable[[str], None],
    shutdown: Shutdown,
    told: Told = lambda *_: None,
) -> int:
    """Serve until `shutdown` is asked for. Closes `listening`; afterwards no thread and no request is left."""
    engine = EngineLoop(
        parts.scheduler,
        parts.adapter,
        parts.watch,
        queue_timeout_s=args.queue_timeout,
        on_failure=shutdown.ask,
        publish=parts.publish,
    )
    gate, texts, app = parts.make_app(engine, args, version("tpukv"))
    http = _HttpServer(
        uvicorn.Config(
            app,
            http=Connection,
            lifespan="off",
            ws="none",
            log_level="error",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=_CLOSING_S,
        )
    )
    engine.start()
    serving: asyncio.Task[None] | None = None
    try:
        serving = asyncio.create_task(http.serve(sockets=[listening]))
        while not http.started and not serving.done():
            await asyncio.sleep(0.01)
        if serving.done():
            await serving  # raises what stopped it
        if await _unless_asked_to_stop(_make_ready(parts, engine, told), shutdown):
            # What is there now stays: no collection of garbage shall look through it while requests are served.
            gc.collect()
            gc.freeze()
            gate.open()
            ready(_url(listening))
        await shutdown.asked()
        gate.close()
        await shutdown.drain(engine, args.shutdown_timeout)
    finally:
        http.should_exit = True
        if serving is not None:
            await serving
        listening.close()
        await engine.stop()
        texts.close()
        gc.unfreeze()
    return 0 if engine.failure is None else 1


async def _unless_asked_to_stop(making_ready: Coroutine[None, None, None], shutdown: Shutdown) -> bool:
    """-> whether it came to its end. Raises what it raises."""
    working, asked = asyncio.create_task(making_ready), asyncio.create_task(shutdown.asked())
    await asyncio.wait({working, asked}, return_when=asyncio.FIRST_COMPLETED)
    finished = working.done()
    asked.cancel()
    working.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await working
    return finished


async def _make_ready(parts: Parts, engine: EngineLoop, told: Told) -> None:
    """Compile what is to be compiled at the start, one program after another, so that a signal need not wait for all.
    Then a token from the whole engine, which compiles the smallest shapes if nothing else did.
    """
    steps = parts.warm_up()
    while (step := await engine.ask(lambda: next(steps, None))) is not None:
        told(*step)
    told("a first token", 1.0)
    request = Request(
        request_id="self-test",
        prompt_token_ids=np.zeros(1, np.int32),
        sampling=SamplingParams(max_tokens=2, ignore_eos=True),
    )
    await engine.submit([request]).wait_for_all()


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if listening.family is socket.AF_INET6 else f"http://{host}:{port}"
