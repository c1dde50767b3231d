"""A server of the OpenAI API over a prefix cache without limit, whose faults can be scripted.

A token is a byte of the prompt's text, and a reply is letters that follow from the prompt. Run as a program it prints
its port, so that a test can let it die.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PAGE_SIZE = 16
MODEL = "scripted"


class ScriptedServer:
    """faults: what goes wrong with the n-th request without a cache salt, counted from 0.

    log: the body of every request of a reply, in the order they came, and "flush".
    """

    def __init__(
        self,
        *,
        faults: dict[int, str] | None = None,
        max_model_len: int = 100_000,
        admin_key: str | None = None,
        reuse: bool = True,
        info: dict[str, Any] | None = None,
        token_delay_s: float = 0.0,
    ) -> None:
        self.faults = faults or {}
        self.log: list[Any] = []
        self.running = 0
        self.most_running = 0
        self._max_model_len = max_model_len
        self._admin_key = admin_key
        self._reuse = reuse
        self._token_delay_s = token_delay_s
        default = {"cache_type": "radix_cache" if reuse else "chunk_cache", "page_size": PAGE_SIZE, "model": MODEL}
        self._info = default if info is None else info
        self._settled: dict[str, list[list[int]]] = defaultdict(list)
        self._unsalted = 0

    @property
    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/server_info", self._server_info),
                Route("/health", lambda _request: Response()),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/flush_cache", self._flush, methods=["POST"]),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ]
        )

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"data": [{"id": MODEL, "max_model_len": self._max_model_len}]})

    async def _server_info(self, request: Request) -> Response:
        return self._refusal(request) or JSONResponse(self._info)

    async def _flush(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        self._settled.clear()
        self.log.append("flush")
        return JSONResponse({"success": True})

    def _refusal(self, request: Request) -> Response | None:
        if self._admin_key is None or request.headers.get("authorization") == f"Bearer {self._admin_key}":
            return None
        return JSONResponse({"error": {"message": "this needs the admin key"}}, status_code=401)

    async def _tokenize(self, request: Request) -> Response:
        tokens = chat_tokens((await request.json())["messages"])
        return JSONResponse({"tokens": tokens, "count": len(tokens), "max_model_len": self._max_model_len})

    async def _completions(self, request: Request) -> Response:
        body = await request.json()
        return self._reply(body, body["prompt"], lambda text: {"text": text})

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        return self._reply(body, chat_tokens(body["messages"]), lambda text: {"delta": {"content": text}})

    def _reply(self, body: dict[str, Any], prompt: list[int], shaped: Any) -> Response:
        self.log.append(body)
        fault = None
        if "cache_salt" not in body:
            fault = self.faults.get(self._unsalted)
            self._unsalted += 1
        if fault == "503":
            return JSONResponse({"error": {"message": "the queue is full"}}, status_code=503)
        if len(prompt) + body["max_tokens"] > self._max_model_len:
            return JSONResponse({"error": {"message": "too long"}}, status_code=400)
        return StreamingResponse(self._events(body, prompt, shaped, fault), media_type="text/event-stream")

    async def _events(
        self, body: dict[str, Any], prompt: list[int], shaped: Any, fault: str | None
    ) -> AsyncIterator[bytes]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            cached = self._match(body.get("cache_salt", ""), prompt)
            reply = reply_text(prompt, body["max_tokens"])
            yield event({"choices": [{"index": 0, **shaped(""), "finish_reason": None}], "usage": None})
            for place, letter in enumerate(reply):
                if place == 2 and fault is not None:
                    async for data in _faulty(fault):
                        yield data
                    if fault != "no usage":
                        return
                await asyncio.sleep(self._token_delay_s)
                yield event({"choices": [{"index": 0, **shaped(letter), "finish_reason": None}], "usage": None})
            self._settled[body.get("cache_salt", "")].append([*prompt, *reply.encode()[:-1]])
            yield event({"choices": [{"index": 0, **shaped(""), "finish_reason": "length"}], "usage": None})
            if fault != "no usage":
                usage = {"prompt_tokens": len(prompt), "completion_tokens": len(reply)}
                yield event({"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": cached}}})
            yield b"data: [DONE]\n\n"
        finally:
            self.running -= 1

    def _match(self, salt: str, prompt: list[int]) -> int:
        if not self._reuse:
            return 0
        longest = max((common(prompt[:-1], one) for one in self._settled[salt]), default=0)
        return longest // PAGE_SIZE * PAGE_SIZE


async def _faulty(fault: str) -> AsyncIterator[bytes]:
    if fault == "malformed":
        yield b"data: {no json\n\n"
    elif fault == "error event":
        yield event({"error": {"message": "the device failed"}})
    elif fault == "abort":
        yield event({"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]})
        yield b"data: [DONE]\n\n"
    elif fault == "hang":
        await asyncio.sleep(3600)
    elif fault == "cut":
        raise ConnectionResetError  # the body ends before its length said so
    elif fault == "die":
        os._exit(1)
    elif fault == "early end":
        yield b'data: {"choi'


def chat_tokens(messages: list[dict[str, str]]) -> list[int]:
    text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
    return list(f"{text}<assistant>".encode())


def reply_text(prompt: list[int], num_tokens: int) -> str:
    seed = zlib.crc32(bytes(token % 256 for token in prompt))
    return "".join(chr(ord("a") + (seed >> place % 24) % 26) for place in range(num_tokens))


def common(one: list[int], other: list[int]) -> int:
    """Length of the common beginning."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


@contextlib.contextmanager
def serving(server: ScriptedServer) -> Iterator[str]:
    """-> the address, on a port of its own, while the context lasts."""
    listening = _listen()
    running = uvicorn.Server(_config(server))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        running.should_exit = True
        thread.join(timeout=60)
        listening.close()


def _listen() -> socket.socket:
    # Named as TCP, else asyncio leaves Nagle's algorithm on, and a reply's first text waits for an acknowledgement.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    listening.listen()  # so that a client may come before uvicorn does
    return listening


def _config(server: ScriptedServer) -> uvicorn.Config:
    return uvicorn.Config(server.app, log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=1)


if __name__ == "__main__":
    faults, delay = json.loads(sys.argv[1]), float(sys.argv[2])
    own = _listen()
    print(own.getsockname()[1], flush=True)
    scripted = ScriptedServer(faults={int(place): fault for place, fault in faults.items()}, token_delay_s=delay)
    uvicorn.Server(_config(scripted)).run(sockets=[own])
