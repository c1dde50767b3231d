"""Sends conversations: each turn after the reply before it, and no more conversations at once than asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from app.bench.serve.conversation import Conversation, Turn
from app.bench.serve.exchange import Exchange, Failure

Clock = Callable[[], float]
Sleep = Callable[[float], Awaitable[None]]
Send = Callable[[Turn, str], Awaitable[Exchange]]
Answers = Callable[[], Awaitable[bool]]

_MAYBE_GONE = ("no connection", "connection lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One request that was sent. `due` and the exchange's times are those of the run's clock.

    last_reply: what stands in the prompt for the server's own answer to the turn before.
    """

    conversation: Conversation
    place: int  # of the turn in its conversation
    due: float
    last_reply: str
    exchange: Exchange

    @property
    def turn(self) -> Turn:
        return self.conversation.turns[self.place]


class _ServerGoneError(Exception):
    """Ends the run from within a conversation."""


class Driver:
    """One run. `sent` grows while it lasts, and keeps what there is when the run is cancelled."""

    def __init__(self, *, send: Send, answers: Answers, now: Clock, sleep: Sleep, concurrency: int) -> None:
        """answers: whether there is still a server; asked after a connection failed."""
        self._send = send
        self._answers = answers
        self._now = now
        self._sleep = sleep
        self._slots = asyncio.Semaphore(concurrency)
        self._sent: list[Sent] = []

    def sent(self) -> list[Sent]:
        """In the order of sending."""
        return sorted(self._sent, key=lambda one: one.exchange.sent)

    async def run(self, conversations: Sequence[Conversation], arrivals: Sequence[float | None]) -> bool:
        """Send everything; -> False when the server went away.

        arrivals: seconds after the start, rising; None begins as soon as there is a slot.

        A conversation that is due while all slots are taken waits, and so do those after it. After a failed turn the
        rest of its conversation is not sent.
        """
        began = self._now()
        gone = False
        try:
            async with asyncio.TaskGroup() as group:
                for conversation, arrival in zip(conversations, arrivals, strict=True):
                    if arrival is not None and (early := began + arrival - self._now()) > 0:
                        await self._sleep(early)
                    await self._slots.acquire()
                    due = self._now() if arrival is None else began + arrival
                    group.create_task(self._converse(conversation, due))
        except* _ServerGoneError:
            gone = True
        return not gone

    async def _converse(self, conversation: Conversation, due: float) -> None:
        try:
            last_reply = ""
            for place in range(len(conversation.turns)):
                exchange = await self._one(conversation, place, due, last_reply)
                if exchange.failure is not None:
                    if exchange.failure.kind in _MAYBE_GONE and not await self._answers():
                        raise _ServerGoneError
                    return
                due, last_reply = exchange.end, exchange.text
        finally:
            self._slots.release()

    async def _one(self, conversation: Conversation, place: int, due: float, last_reply: str) -> Exchange:
        began = self._now()
        try:
            exchange = await self._send(conversation.turns[place], last_reply)
        except asyncio.CancelledError:
            failure = Failure(kind="interrupted", message="the run ended before the reply")
            stopped = Exchange(sent=began, end=self._now(), failure=failure)
            self._keep(conversation, place, due, last_reply, stopped)
            raise
        self._keep(conversation, place, due, last_reply, exchange)
        return exchange

    def _keep(self, conversation: Conversation, place: int, due: float, last_reply: str, exchange: Exchange) -> None:
        self._sent.append(
            Sent(conversation=conversation, place=place, due=due, last_reply=last_reply, exchange=exchange)
        )


class LoopLag:
    """How late the event loop wakes those who sleep: the client's own share of every time it measures."""

    def __init__(self, *, now: Clock, sleep: Sleep, every_s: float = 0.02) -> None:
        self._now = now
        self._sleep = sleep
        self._every_s = every_s
        self._largest_s = 0.0

    @property
    def largest_s(self) -> float:
        return self._largest_s

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            asleep = self._now()
            await self._sleep(self._every_s)
            self._largest_s = max(self._largest_s, self._now() - asleep - self._every_s)
