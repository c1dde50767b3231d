"""Thirty clients at once, good ones and bad ones, for a number of rounds: the server answers each as it should, counts
right, and is afterwards what it was before.

A calm round has no cancelled requests, so that client and server must agree on every number; a stormy one has.
"""

from __future__ import annotations

import asyncio
import gc
import io
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import httpx
import pytest
import structlog

from app.observability.logging import configure_logging
from app.server.run import listen
from tests.support.server import running_server
from tests.support.soak_acts import CALM, MAX_BODY_BYTES, STORMY, Act
from tests.support.soak_site import Books, Figures, Site, check_books, figures

CLIENTS = 30
WARM_UP_ROUNDS = 2  # one of each kind, in which everything is loaded and compiled
SETTLING_S = 30  # at most, until the server has noticed that its clients have gone
HANGS_AFTER_S = 300  # of a round; it takes some seconds

# What the last round may hold more than the first. Objects: those the garbage collector follows; some thousand come at
# once with what is loaded or compiled late, and a leak brings several with each request. Memory: the system's view of
# the whole process, where what was freed lies about in pieces.
OBJECTS_A_REQUEST = 0.1
OBJECTS_IN_ALL = 10_000
GROWTH_BYTES = 64 * 2**20

SEND_BUFFER = 16 * 1024  # of a connection; its new ones inherit it

SERVER = {"page_size": 4, "max_total_tokens": 192, "max_running_requests": 6, "chunked_prefill_size": 32}
HTTP = {"max_queued_requests": 24, "max_body_bytes": MAX_BODY_BYTES, "body_timeout": 2.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One round: what clients saw, the server's figures at its end, and what the process held then."""

    books: Books
    figures: Figures
    objects: int
    resident: int


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads open files and memory from /proc")


@pytest.fixture
def errors_logged() -> Iterator[io.StringIO]:
    """What the server logs at level error."""
    stream = io.StringIO()
    configure_logging("error", "json", stream)
    yield stream
    structlog.reset_defaults()


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system keeps little of what clients have not read, so that the server has to wait for them."""

    def listen_so(host: str, port: int) -> socket.socket:
        listening = listen(host, port)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        return listening

    monkeypatch.setattr("tests.support.server.listen", listen_so)


def soak(rounds: int, visits: int, seed: int) -> list[Seen]:
    """Rounds, calm and stormy in turn, over one server; in each, a client comes `visits` times.

    -> one entry a round, without those for warming up. An odd number ends with a round like the first.
    """
    files_before = open_files()
    with running_server(http=HTTP, **SERVER) as server:
        seen = asyncio.run(all_rounds(server.url, WARM_UP_ROUNDS + rounds, visits, seed))
    assert open_files() <= files_before
    return seen[WARM_UP_ROUNDS:]


async def all_rounds(url: str, rounds: int, visits: int, seed: int) -> list[Seen]:
    seen: list[Seen] = []
    async with httpx.AsyncClient(base_url=url, timeout=HANGS_AFTER_S) as observer:
        before = await figures(observer)
        quiet_files = open_files()
        for number in range(rounds):
            async with asyncio.timeout(HANGS_AFTER_S):
                rng = Random(f"{seed} {number}")
                seen.append(await one_round(url, observer, before, rng, visits, stormy=number % 2 == 1))
            await until_closed(quiet_files)
            before = seen[-1].figures
    return seen


async def one_round(
    url: str, observer: httpx.AsyncClient, before: Figures, rng: Random, visits: int, *, stormy: bool
) -> Seen:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CLIENTS // 2)
    async with httpx.AsyncClient(base_url=url, timeout=HANGS_AFTER_S, limits=limits) as http:
        site = Site(url, http, aborts=stormy)
        acts = STORMY if stormy else CALM
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(client(site, acts, visits, Random(rng.random())))
    await until_idle(observer)
    await check_empty_after_flush(observer)
    after = await figures(observer)
    check_books(site.books, before, after, exact=not stormy)
    gc.collect()
    return Seen(books=site.books, figures=after, objects=len(gc.get_objects()), resident=resident_bytes())


async def client(site: Site, acts: Sequence[tuple[int, Act]], visits: int, rng: Random) -> None:
    weights, choices = zip(*acts, strict=True)
    for act in rng.choices(choices, weights, k=visits):
        await act(site, rng)


async def until_idle(observer: httpx.AsyncClient) -> None:
    while (await observer.get("/server_info")).raise_for_status().json()["num_requests"]:
        await asyncio.sleep(0.02)


async def check_empty_after_flush(observer: httpx.AsyncClient) -> None:
    """With no request left, no page is locked or held, and every page can be had back."""
    (await observer.post("/flush_cache", json={"timeout": SETTLING_S})).raise_for_status()
    [tier] = (await observer.get("/cache_state")).raise_for_status().json()["tiers"]
    assert tier["free"] == tier["capacity"], tier


async def until_closed(num_files: int) -> None:
    """The server notices on its own that its clients have gone; not noticing is a leak."""
    end = time.monotonic() + SETTLING_S
    while open_files() > num_files:
        assert time.monotonic() < end, f"{open_files()} files are open and not {num_files}"
        await asyncio.sleep(0.05)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_traffic(seen: list[Seen]) -> None:
    """It was what it is for: requests were served, refused and cancelled, pages evicted, requests put back."""
    served, cancelled = sum(one.books.served for one in seen), sum(one.books.cancelled for one in seen)
    last = seen[-1].figures
    print(f"{served} requests served, {cancelled} cancelled, {last.ended['abort']} choices ended by abort, ", end="")
    print(f"{last.evicted_tokens} tokens evicted, {last.retractions} retractions; refused: {dict(last.refused)}")
    print(f"memory, MiB, by round: {[one.resident >> 20 for one in seen]}")
    print(f"objects by round: {[one.objects for one in seen]}")
    assert served > 10 * len(seen)
    assert cancelled
    assert last.refused["queue_full"]
    assert last.evicted_tokens
    assert last.retractions
    assert last.ended["abort"]


def check_flat(seen: list[Seen]) -> None:
    """The first and the last round were of the same kind."""
    early, late = seen[0], seen[-1]
    handled = sum(each.books.served + each.books.num_refused + each.books.cancelled for each in seen[1:])
    assert late.objects - early.objects < OBJECTS_IN_ALL + OBJECTS_A_REQUEST * handled
    assert late.resident - early.resident < GROWTH_BYTES


def check_nothing_logged(errors_logged: io.StringIO, caplog: pytest.LogCaptureFixture) -> None:
    """No client made the server, or the event loop under it, speak of a mistake."""
    assert errors_logged.getvalue() == ""
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.usefixtures("small_buffers")
def test_thirty_hostile_clients_get_what_they_should_and_leave_nothing_behind(
    errors_logged: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    seen = soak(rounds=3, visits=2, seed=0)

    check_traffic(seen)
    check_flat(seen)
    check_nothing_logged(errors_logged, caplog)


@pytest.mark.slow
@pytest.mark.usefixtures("small_buffers")
def test_minutes_of_hostile_clients_leave_memory_flat(
    errors_logged: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    seen = soak(rounds=41, visits=4, seed=1)

    check_traffic(seen)
    check_flat(seen)
    check_nothing_logged(errors_logged, caplog)
