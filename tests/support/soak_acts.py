"""What clients do to a server in a soak, good and bad. Each act is one visit; it checks what it gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

from tests.support.soak_requests import CHAT, COMPLETIONS, Asked, ask
from tests.support.soak_site import BUSY, Site
from tests.support.soak_wire import Pause, Wire, chunk, connected, head, post

Act = Callable[[Site, Random], Awaitable[None]]

MAX_BODY_BYTES = 64 * 1024  # of the server
_CANCELLED_AFTER_S = 0.15  # at most
# The smallest that this system's loopback still serves at once: with less, it waits seconds for its own probes.
_SMALL = 65536
_READ_AHEAD = 1024
_NO_HTTP = tuple(b"HTTP/1.1 %d" % status for status in (400, 403, 415, 429))

# -- good requests -------------------------------------------------------------------------------------------------


async def ask_and_wait(site: Site, rng: Random) -> None:
    asked = ask(rng)
    reply = await site.http.post(asked.path, json=asked.body)
    site.settle(asked, reply.status_code, reply.content)


async def ask_again_on_one_connection(site: Site, rng: Random) -> None:
    async with connected(site.port) as wire:
        for _ in range(3):
            await _served(site, wire, ask(rng))
            await wire.send(post(COMPLETIONS, b"{"))
            site.refused_reply(await wire.reply(), {400: None, **BUSY})


async def ask_before_the_last_answer(site: Site, rng: Random) -> None:
    """Pipelining: requests in one piece, answers in their order."""
    several = [ask(rng) for _ in range(3)]
    async with connected(site.port) as wire:
        await wire.send(b"".join(post(asked.path, asked.raw) for asked in several))
        for asked in several:
            reply = await wire.reply()
            site.settle(asked, reply.status, reply.body)


async def read_byte_by_byte(site: Site, rng: Random) -> None:
    asked = ask(rng, num_choices=1, max_tokens=8)
    async with connected(site.port, receive_buffer=_SMALL, read_ahead=_READ_AHEAD) as wire:
        await wire.send(post(asked.path, asked.raw))
        reply = await wire.reply(read_size=1)
    site.settle(asked, reply.status, reply.body)


async def stop_reading_for_a_while(site: Site, rng: Random) -> None:
    """A large answer, more than the system keeps for a client that does not take it."""
    asked = ask(rng, stream=True, num_choices=16, max_tokens=100, logprobs=20)
    async with connected(site.port, receive_buffer=_SMALL, read_ahead=_READ_AHEAD) as wire:
        await wire.send(post(asked.path, asked.raw))
        reply = await wire.reply(pause=_sleeping(rng, 1.0))
    site.settle(asked, reply.status, reply.body)


async def write_slowly(site: Site, rng: Random) -> None:
    asked = ask(rng)
    raw = asked.raw
    async with connected(site.port) as wire:
        if rng.random() < 0.5:
            pieces = [head("POST", asked.path, "Content-Type: application/json", f"Content-Length: {len(raw)}"), raw]
        else:
            fields = ("Content-Type: application/json", "Transfer-Encoding: chunked")
            pieces = [head("POST", asked.path, *fields), chunk(raw[:9]), chunk(raw[9:]), chunk(b"")]
        for piece in pieces:
            cut = rng.randrange(1, len(piece))
            for part in (piece[:cut], piece[cut:]):
                await wire.send(part)
                await asyncio.sleep(rng.uniform(0, 0.02))
        reply = await wire.reply()
    site.settle(asked, reply.status, reply.body)


async def wait_for_leave_to_send(site: Site, rng: Random) -> None:
    """Expect: 100-continue, as curl sends it with a large body."""
    asked = ask(rng)
    fields = ("Content-Type: application/json", f"Content-Length: {len(asked.raw)}", "Expect: 100-continue")
    async with connected(site.port) as wire:
        await wire.send(head("POST", asked.path, *fields))
        told = await wire.some(4096)
        if told.startswith(b"HTTP/1.1 100"):
            await wire.send(asked.raw)
            reply = await wire.reply()
            site.settle(asked, reply.status, reply.body)
        else:  # refused before it sent anything
            assert told.startswith(b"HTTP/1.1 429"), told
            site.books.refused["queue_full"] += 1


async def look_around(site: Site, rng: Random) -> None:
    path = rng.choice(("/metrics", "/cache_state", "/server_info", "/health", "/v1/models", "/openapi.json", "/"))
    reply = (await site.http.get(path)).raise_for_status()
    if path == "/cache_state":
        [tier] = reply.json()["tiers"]
        parts = ("cached_locked", "cached_unlocked", "held_by_requests", "restoring", "free")
        assert sum(tier[part]["pages"] for part in parts) == tier["capacity"]["pages"], tier
    assert (await site.http.head(path)).content == b""


async def tokenize(site: Site, rng: Random) -> None:
    text = "".join(rng.choices("abé漢🎉 \n\0", k=rng.randrange(200)))
    tokens = (await site.http.post("/tokenize", json={"prompt": text})).raise_for_status().json()["tokens"]
    told = (await site.http.post("/detokenize", json={"tokens": tokens})).raise_for_status().json()
    assert told == {"prompt": text}


# -- bad requests --------------------------------------------------------------------------------------------------


async def send_nonsense(site: Site, rng: Random) -> None:
    """A body that is no request."""
    good = ask(rng)
    wrong = [
        rng.randbytes(rng.randrange(1, 200)),
        b"",
        good.raw[: rng.randrange(1, len(good.raw))],
        good.raw.replace(b'"model"', b'"mod\xff\xfeel"'),
        b'{"model": "\\ud800", "prompt": "a"}',
        b"[" * 30_000,
        b"[]",
        b"null",
        b'{"model": ' + b"9" * 5000 + b"}",
        json.dumps({**good.body, "n": "two"}).encode(),
        json.dumps({**good.body, "temperature": -1}).encode(),
        json.dumps({**good.body, "max_tokens": 2**40}).encode(),
        json.dumps({**good.body, "logit_bias": {"5": 101}}).encode(),
        json.dumps({**good.body, "stop": [""] * 3}).encode(),
        json.dumps({**good.body, "tools": [{"type": "function"}]}).encode(),
        json.dumps({**good.body, "prompt": [[]], "messages": []}).encode(),
    ]
    raw = rng.choice(wrong)
    reply = await site.http.post(good.path, content=raw, headers={"content-type": "application/json"})
    site.refusal(reply.status_code, reply.content, {400: None, **BUSY})


async def ask_for_what_cannot_be(site: Site, rng: Random) -> None:
    """Well-formed, and refused: longer than the context, another model, another type of body."""
    good = ask(rng)
    too_long = {400: "context_length_exceeded", **BUSY}
    other = {404: "model_not_found", **BUSY}
    bodies = [
        (json.dumps({**good.body, "max_tokens": 4000}).encode(), "application/json", too_long),
        (json.dumps({**good.body, "model": "gpt-4"}).encode(), "application/json", other),
        (good.raw, "text/plain", {415: "unsupported_media_type", **BUSY}),
        (b" " * (MAX_BODY_BYTES + 1), "application/json", {413: "request_too_large", **BUSY}),
    ]
    raw, media, allowed = rng.choice(bodies)
    async with connected(site.port) as wire:
        await wire.send(post(good.path, raw, media))
        site.refused_reply(await wire.reply(), allowed)


async def send_too_much(site: Site, rng: Random) -> None:
    """A body without a length that grows past the limit."""
    fields = ("Content-Type: application/json", "Transfer-Encoding: chunked")
    async with connected(site.port) as wire:
        await wire.send(head("POST", COMPLETIONS, *fields))
        for _ in range(1 + MAX_BODY_BYTES // 8192):
            await wire.send(chunk(b" " * 8192))
        site.refused_reply(await wire.reply(), {413: "request_too_large", **BUSY})


async def never_finish_sending(site: Site, rng: Random) -> None:
    asked = ask(rng)
    async with connected(site.port) as wire:
        await wire.send(post(asked.path, asked.raw)[:-1])
        site.refused_reply(await wire.reply(), {408: "request_timeout", **BUSY})


async def use_the_wrong_method(site: Site, rng: Random) -> None:
    path = rng.choice((COMPLETIONS, CHAT, "/metrics", "/flush_cache", "/"))
    async with connected(site.port) as wire:
        for method in ("OPTIONS", "PUT", "DELETE", "PATCH", "TRACE"):
            await wire.send(head(method, path))
            reply = await wire.reply(method=method)
            site.refused_reply(reply, {405: "method_not_allowed"})
            assert reply.headers["allow"]
        await wire.send(head("GET", "/v2/" + "x" * rng.randrange(1000)))
        site.refused_reply(await wire.reply(method="GET"), {404: "unknown_url"})


async def look_like_an_attack(site: Site, rng: Random) -> None:
    """What a page of somebody else's, or a name that is led here, would send."""
    fields = rng.choice(
        (("Origin: http://elsewhere.example",), ("Origin: http://[",), ("Origin: null",), ("Origin: \xff",))
    )
    async with connected(site.port) as wire:
        await wire.send(head("GET", "/health", *fields))
        site.refused_reply(await wire.reply(method="GET"), {403: "forbidden"})
        await wire.send(head("GET", "/health").replace(b"127.0.0.1", b"elsewhere.example"))
        site.refused_reply(await wire.reply(method="GET"), {403: "forbidden"})


async def speak_no_http(site: Site, rng: Random) -> None:
    """Whatever it is, the connection ends, and nothing is said but that it was no request."""
    said = rng.choice(
        (
            rng.randbytes(rng.randrange(1, 300)) + b"\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS greeting \r\n\r\n",
            head("GET", "/health", "X: " + "y" * 200_000),
            head("GET", "/health", "Content-Length: 5", "Content-Length: 6"),
            head("POST", COMPLETIONS, "Content-Length: -1"),
            head("POST", COMPLETIONS, "Transfer-Encoding: chunked", "Content-Type: text/plain") + b"zz\r\n",
        )
    )
    async with connected(site.port) as wire:
        try:
            await wire.send(said)
            wire.end_sending()
            told = await wire.rest()
        except OSError:  # it had heard enough
            told = b""
    assert told == b"" or told[:12] in _NO_HTTP, told
    # The last one is a request as far as its head: the server's own books may have it.
    site.books.left["no HTTP"] += 1


CALM: tuple[tuple[int, Act], ...] = (
    (12, ask_and_wait),
    (3, ask_again_on_one_connection),
    (3, ask_before_the_last_answer),
    (2, read_byte_by_byte),
    (1, stop_reading_for_a_while),
    (3, write_slowly),
    (1, wait_for_leave_to_send),
    (3, look_around),
    (1, tokenize),
    (4, send_nonsense),
    (2, ask_for_what_cannot_be),
    (1, send_too_much),
    (1, never_finish_sending),
    (1, use_the_wrong_method),
    (1, look_like_an_attack),
)
"""Acts after which client and server can agree on every number."""


# -- leaving, and ending what others asked for ---------------------------------------------------------------------


async def leave_before_the_end_of_the_head(site: Site, rng: Random) -> None:
    asked = ask(rng)
    async with connected(site.port) as wire:
        await wire.send(head("POST", asked.path, "Content-Type: application/json")[: rng.randrange(60)])
        await _leave(site, wire, rng)


async def leave_before_the_end_of_the_body(site: Site, rng: Random) -> None:
    asked = ask(rng)
    async with connected(site.port) as wire:
        await wire.send(post(asked.path, asked.raw)[: -rng.randrange(1, len(asked.raw))])
        await _leave(site, wire, rng)


async def leave_before_the_answer(site: Site, rng: Random) -> None:
    asked = ask(rng)
    async with connected(site.port) as wire:
        await wire.send(post(asked.path, asked.raw))
        await _leave(site, wire, rng)


async def leave_in_the_midst_of_the_answer(site: Site, rng: Random) -> None:
    asked = ask(rng, stream=True, num_choices=rng.choice((1, 4)), max_tokens=100)
    async with connected(site.port, receive_buffer=_SMALL, read_ahead=_READ_AHEAD) as wire:
        await wire.send(post(asked.path, asked.raw))
        for _ in range(rng.randrange(1, 20)):
            await wire.some(256)
        await _leave(site, wire, rng)


async def leave_answers_unread(site: Site, rng: Random) -> None:
    """Large answers that fill every buffer on the way, and then nobody is there."""
    asked = ask(rng, stream=True, num_choices=12, max_tokens=100, logprobs=20)
    async with connected(site.port, receive_buffer=_SMALL, read_ahead=_READ_AHEAD) as wire:
        await wire.send(post(asked.path, asked.raw) * 2)
        await asyncio.sleep(rng.uniform(0, 0.5))
        await _leave(site, wire, rng)


async def connect_and_say_nothing(site: Site, rng: Random) -> None:
    async with connected(site.port) as wire:
        await wire.send(b"POST /v1/compl"[: rng.randrange(14)])
        await asyncio.sleep(rng.uniform(0, 0.5))
        await _leave(site, wire, rng)


async def flush(site: Site, rng: Random) -> None:
    reply = await site.http.post("/flush_cache", json={"timeout": rng.choice((0, 0.1))})
    if reply.status_code == 200:
        assert reply.json()["flushed_pages"] >= 0
    else:
        site.refusal(reply.status_code, reply.content, {409: "conflict"})


async def flush_and_leave(site: Site, rng: Random) -> None:
    async with connected(site.port) as wire:
        await wire.send(post("/flush_cache", b'{"timeout": 3600}'))
        await asyncio.sleep(rng.uniform(0, 0.1))
        await _leave(site, wire, rng)


async def end_an_own_request(site: Site, rng: Random) -> None:
    """By the id that the head of its answer tells. What came before the end is still right."""
    asked = ask(rng, stream=True, max_tokens=100)
    async with site.http.stream("POST", asked.path, json=asked.body) as reply:
        if reply.status_code == 200:
            ended = await site.http.post("/abort_request", json={"rid": reply.headers["x-request-id"]})
            assert ended.raise_for_status().json()["aborted"] <= asked.num_choices
        site.settle(asked, reply.status_code, await reply.aread(), may_be_aborted=True)


async def end_all_requests(site: Site, rng: Random) -> None:
    (await site.http.post("/abort_request", json={"abort_all": True})).raise_for_status()


async def ask_for_a_token(site: Site, rng: Random) -> None:
    reply = await site.http.get("/health_generate")
    if reply.status_code != 200:  # others end all requests, and this one is one
        site.refusal(reply.status_code, reply.content, {503: "no_token"})


STORMY: tuple[tuple[int, Act], ...] = (
    *CALM,
    (2, speak_no_http),
    (2, leave_before_the_end_of_the_head),
    (3, leave_before_the_end_of_the_body),
    (5, leave_before_the_answer),
    (7, leave_in_the_midst_of_the_answer),
    (2, leave_answers_unread),
    (2, connect_and_say_nothing),
    (3, flush),
    (1, flush_and_leave),
    (3, end_an_own_request),
    (1, end_all_requests),
    (1, ask_for_a_token),
)


async def _served(site: Site, wire: Wire, asked: Asked) -> None:
    await wire.send(post(asked.path, asked.raw))
    reply = await wire.reply()
    site.settle(asked, reply.status, reply.body)


async def _leave(site: Site, wire: Wire, rng: Random) -> None:
    """At some moment, in one of three ways; the caller closes the connection."""
    await asyncio.sleep(rng.uniform(0, _CANCELLED_AFTER_S))
    way = rng.choice(("closed", "reset", "half-closed"))
    site.books.cancelled += 1
    site.books.left[way] += 1
    with suppress(OSError):  # the server may be first
        if way == "reset":
            wire.reset()
        elif way == "half-closed":
            wire.end_sending()
            await wire.rest()


def _sleeping(rng: Random, most_s: float) -> Pause:
    async def sleep() -> None:
        await asyncio.sleep(rng.uniform(0, most_s))

    return sleep
