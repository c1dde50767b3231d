"""Sends one turn and times its reply."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from app.bench.serve.conversation import Turn
from app.bench.serve.exchange import Exchange, Failure
from app.bench.serve.sse import EventSplitter, EventTooLongError
from app.bench.serve.wire import Chunk, Usage, error_text

if TYPE_CHECKING:
    import httpx

Clock = Callable[[], float]

_DONE = b"[DONE]"


class StreamedReply:
    """The events of one reply, as they come. After `failure` is set, nothing more is read."""

    def __init__(self) -> None:
        self._splitter = EventSplitter()
        self._decoder = msgspec.json.Decoder(Chunk)
        self._texts: list[str] = []
        self._done = False
        self.deltas: list[float] = []
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.failure: Failure | None = None

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def feed(self, received: bytes, now: float) -> None:
        """Take bytes that came at `now`."""
        try:
            for data in self._splitter.feed(received):
                self._event(data, now)
        except EventTooLongError as error:
            self._fail(Failure(kind="malformed", message=str(error)))

    def close(self) -> None:
        """The stream has ended: it must be whole."""
        if self.finish_reason == "abort":
            self._fail(Failure(kind="aborted", message="the server aborted the request"))
        elif not self._done:
            what = "in the middle of an event" if self._splitter.unfinished else "before [DONE]"
            self._fail(Failure(kind="connection lost", message=f"the stream ended {what}"))
        elif self.finish_reason is None:
            self._fail(Failure(kind="malformed", message="the reply ended without a finish_reason"))
        elif self.usage is None:
            self._fail(Failure(kind="no usage", message="the server sent no usage, though it was asked for"))

    def _event(self, data: bytes, now: float) -> None:
        if data == _DONE:
            self._done = True
            return
        try:
            chunk = self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            shown = data[:80].decode("utf-8", "replace")
            self._fail(Failure(kind="malformed", message=f"an event that cannot be read: {shown!r} ({error})"))
            return
        if chunk.error is not None:
            self._fail(Failure(kind="error event", message=chunk.error.message))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices:
            text = choice.text if choice.delta is None else choice.delta.content
            if text:
                self._texts.append(text)
                self.deltas.append(now)
            if choice.finish_reason is not None:
                self.finish_reason = choice.finish_reason

    def _fail(self, failure: Failure) -> None:
        """The first failure is the one that counts."""
        self.failure = self.failure or failure


class StreamingClient:
    """Sends turns to one model of one server, through a connection pool that somebody else opens and closes."""

    def __init__(
        self, *, http: httpx.AsyncClient, now: Clock, model: str, timeout_s: float, cache_salt: str | None
    ) -> None:
        """cache_salt: requests with different salts share nothing in the server's cache; None sends none."""
        self._http = http
        self._now = now
        self._model = model
        self._timeout_s = timeout_s
        self._cache_salt = cache_salt

    async def send(self, turn: Turn, last_reply: str) -> Exchange:
        """-> what came back, failed or not; raises nothing for what the network or the server does wrong."""
        import httpx

        body = self._body(turn, last_reply)  # before the clock starts
        reply = StreamedReply()
        sent = self._now()
        head = None
        try:
            async with asyncio.timeout(self._timeout_s):
                async with self._http.stream("POST", turn.path, content=body) as response:
                    head = self._now()
                    if response.status_code != 200:
                        message = error_text(await response.aread())
                        failure = Failure(kind="refused", message=message, status=response.status_code)
                        return Exchange(sent=sent, end=self._now(), first_byte=head, failure=failure)
                    async for received in response.aiter_bytes():
                        reply.feed(received, self._now())
                        if reply.failure is not None:
                            break
            reply.close()
            failed = reply.failure
        except TimeoutError:
            failed = Failure(kind="timeout", message=f"no whole reply within {self._timeout_s:g} s")
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            failed = Failure(kind="no connection", message=str(error) or type(error).__name__)
        except httpx.HTTPError as error:
            failed = Failure(kind="connection lost", message=str(error) or type(error).__name__)
        return self._exchange(sent, head, reply, failed)

    def _exchange(self, sent: float, head: float | None, reply: StreamedReply, failure: Failure | None) -> Exchange:
        usage = reply.usage or Usage(prompt_tokens=0)
        details = usage.prompt_tokens_details
        return Exchange(
            sent=sent,
            end=self._now(),
            first_byte=head,
            deltas=tuple(reply.deltas),
            text=reply.text,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=None if details is None else details.cached_tokens,
            finish_reason=reply.finish_reason,
            failure=failure,
        )

    def _body(self, turn: Turn, last_reply: str) -> bytes:
        salt = {} if self._cache_salt is None else {"cache_salt": self._cache_salt}
        return msgspec.json.encode(
            {
                "model": self._model,
                **turn.prompt_fields(last_reply),
                "max_tokens": turn.max_tokens,
                "ignore_eos": turn.ignore_eos,
                "temperature": 0.0,  # the same replies from every cache type, so later prompts are the same, too
                "stream": True,
                "stream_options": {"include_usage": True},
                **salt,
            }
        )
