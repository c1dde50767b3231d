"""The thread that runs the scheduler, and the way to it from the event loop.

    event loop                                           engine thread
    submit, abort, ask  ------ SimpleQueue ------>  take in what came, Scheduler.step(), and again
    Mailbox, future  <--- call_soon_threadsafe, once a step, with all that the step produced

Neither waits for the other: the event loop never blocks on a step, and the engine never on a client.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import structlog

from app.errors import RequestError
from app.scheduler_adapter import SchedulerAdapter
from app.scheduling.request import Request, RequestDelta, RequestOutput
from app.scheduling.scheduler import Scheduler
from app.server.engine_watch import EngineWatch
from app.server.mailbox import Mailbox
from app.server.openai_errors import (
    ApiError,
    device_failure,
    engine_failed,
    from_request_error,
    out_of_capacity,
    queue_timeout,
    shutting_down,
)

_log = structlog.get_logger(__name__)

# Between two looks at what moves between tiers while no request is there; a message ends it at once.
_BACKGROUND_WAIT_S = 0.005

Answer = TypeVar("Answer")
Message = Callable[[], None]  # run on the engine's thread, between two steps


@dataclass(frozen=True, slots=True, kw_only=True)
class _News:
    """What one step, or one message, has to tell."""

    deltas: list[RequestDelta] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    refusals: list[tuple[str, ApiError]] = field(default_factory=list)


class EngineLoop:
    """Uses the scheduler from `start` until `stop` has returned. Its methods are for the event loop's thread.

    failure: what broke the engine, if anything did: a bug of ours. Every request was then answered with an error.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        adapter: SchedulerAdapter,
        watch: EngineWatch,
        *,
        queue_timeout_s: float,
        on_failure: Callable[[], None],
        publish: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_failure` is called on the event loop, once; `publish` on the engine's thread, after all that it does."""
        self._scheduler = scheduler
        self._adapter = adapter
        self._watch = watch
        self._queue_timeout_s = queue_timeout_s
        self._on_failure = on_failure
        self._publish = publish
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}  # of requests without a terminal reply
        self._questions: set[asyncio.Future[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed: ApiError | None = None  # what is told once the thread takes nothing more
        self.failure: BaseException | None = None
        # The engine thread's own:
        self._refusals: dict[str, ApiError] = {}  # what an aborted request is told instead of its output
        self._deadlines: OrderedDict[str, int] = OrderedDict()  # ns, of requests not started yet; oldest first
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine")

    def start(self) -> None:
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Requests that have no terminal reply yet."""
        return len(self._mailboxes)

    def submit(self, requests: list[Request]) -> Mailbox:
        """Hand requests over; each gets exactly one terminal reply, in the mailbox."""
        mailbox = Mailbox([request.request_id for request in requests])
        if self._closed is not None:
            mailbox.refused(self._closed)
            return mailbox
        for request in requests:
            self._mailboxes[request.request_id] = mailbox
        self._idle.clear()
        submitted_ns = time.monotonic_ns()
        self._inbox.put(lambda: self._add(requests, submitted_ns))
        return mailbox

    def abort(self, mailbox: Mailbox) -> None:
        """End what has not ended of it; that is still told, if anybody looks. Idempotent."""
        alive = [request_id for request_id in mailbox.request_ids if request_id in self._mailboxes]
        if alive:
            self._inbox.put(lambda: self._abort(alive, None))

    def abort_matching(self, chosen: Callable[[str], bool], refusal: ApiError | None) -> int:
        """End requests chosen by id. Those that were not started yet are told `refusal`. -> how many."""
        alive = [request_id for request_id in self._mailboxes if chosen(request_id)]
        if alive:
            self._inbox.put(lambda: self._abort(alive, refusal))
        return len(alive)

    async def ask(self, question: Callable[[], Answer]) -> Answer:
        """`question()` run on the engine's thread between two steps. Raises what it raised, ApiError once closed."""
        if self._closed is not None:
            raise self._closed
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._questions.add(future)
        self._inbox.put(lambda: self._answer(question, future))
        try:
            return await future
        finally:
            self._questions.discard(future)

    async def wait_until_idle(self) -> None:
        """Until every request has its terminal reply."""
        await self._idle.wait()

    async def wait_until_drained(self) -> None:
        """Until nothing moves between tiers either, or the engine has ended."""
        await self._idle.wait()
        with suppress(ApiError):
            while await self.ask(self._scheduler.has_background_work):
                await asyncio.sleep(_BACKGROUND_WAIT_S)

    async def stop(self) -> None:
        """End the thread; what still runs is aborted. Afterwards everybody has been answered. Idempotent."""
        self._inbox.put(self._begin_stop)
        await self._loop.run_in_executor(None, self._thread.join)
        await asyncio.sleep(0)  # the thread's last deliveries
        self._close(shutting_down())

    # -- on the event loop, from the engine --------------------------------------------------------------------------

    def _deliver(self, news: _News) -> None:
        for delta in news.deltas:
            if delta.request_id in self._mailboxes:
                self._mailboxes[delta.request_id].gained(delta)
        for output in news.outputs:
            self._mailboxes.pop(output.request_id).ended(output)
        for request_id, error in news.refusals:
            self._mailboxes.pop(request_id).refused(error)
        if not self._mailboxes:
            self._idle.set()

    def _close(self, error: ApiError) -> None:
        """Nothing more will come from the thread: whoever still waits is told so."""
        if self._closed is not None:
            return
        self._closed = error
        self._deliver(_News(refusals=[(request_id, error) for request_id in self._mailboxes]))
        for future in self._questions:
            _fail(future, error)

    def _broken(self, failure: BaseException) -> None:
        self.failure = failure
        self._close(engine_failed())
        self._on_failure()

    # -- on the engine's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_messages():
                if self._scheduler.has_work():
                    self._step()
                elif self._scheduler.has_background_work():
                    self._scheduler.step(patience_s=0.0)
                    self._watch.measure(self._scheduler, self._adapter)
                self._publish()
            self._publish()
        except BaseException as error:  # a bug: nothing that a request may ask leads here
            _log.critical("engine_failed", error=repr(error), exc_info=error)
            self._call(self._broken, error)

    def _take_messages(self) -> bool:
        """Run what came; wait for something if there is nothing else to do. -> whether to go on."""
        busy = self._scheduler.has_work()
        if self._stopping:
            return busy
        if not busy:
            self._wait_for_a_message()
        while not self._inbox.empty():
            self._inbox.get()()
        return True

    def _wait_for_a_message(self) -> None:
        """And run it. While something moves between tiers, not for long."""
        timeout_s = _BACKGROUND_WAIT_S if self._scheduler.has_background_work() else None
        try:
            message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return
        message()

    def _step(self) -> None:
        self._expire()
        outputs = self._scheduler.step()
        news = _News(deltas=self._watch.take_deltas())
        for request_id in self._watch.take_admitted():
            self._deadlines.pop(request_id, None)
        for output in outputs:
            self._deadlines.pop(output.request_id, None)
            refusal = self._refusals.pop(output.request_id, None) or _refusal(output)
            self._watch.ended(output, refusal is not None)
            if refusal is None:
                news.outputs.append(output)
            else:
                news.refusals.append((output.request_id, refusal))
        self._watch.measure(self._scheduler, self._adapter)
        self._call(self._deliver, news)

    def _add(self, requests: list[Request], submitted_ns: int) -> None:
        deadline = submitted_ns + int(self._queue_timeout_s * 1e9)
        for request in requests:
            self._watch.added(request, submitted_ns)
            try:
                self._scheduler.add(request)
            except RequestError as error:
                self._watch.refused(request)
                self._call(self._deliver, _News(refusals=[(request.request_id, from_request_error(error))]))
            else:
                self._deadlines[request.request_id] = deadline

    def _abort(self, request_ids: list[str], refusal: ApiError | None) -> None:
        for request_id in request_ids:
            if refusal is not None and request_id in self._deadlines:
                self._refusals[request_id] = refusal
            self._scheduler.abort(request_id)

    def _expire(self) -> None:
        """Refuse those that have waited too long to be started. O(those)."""
        now = time.monotonic_ns()
        while self._deadlines:
            request_id, deadline = next(iter(self._deadlines.items()))
            if deadline > now:
                return
            self._abort([request_id], queue_timeout(self._queue_timeout_s))
            del self._deadlines[request_id]

    def _answer(self, question: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        try:
            answer = question()
        except Exception as error:
            self._call(_fail, future, error)
        else:
            self._call(_fulfil, future, answer)

    def _begin_stop(self) -> None:
        self._stopping = True
        self._abort([progress.request_id for progress in self._scheduler.progress()], None)

    def _call(self, function: Callable[..., None], *args: Any) -> None:
        self._loop.call_soon_threadsafe(function, *args)


def _refusal(output: RequestOutput) -> ApiError | None:
    """A request that the engine could not serve to its end is told so instead of what it had."""
    match output.finish_reason:
        case "capacity":
            return out_of_capacity(output.error or "")
        case "error":
            return device_failure()
        case _:
            return None


def _fulfil(future: asyncio.Future[Any], answer: object) -> None:
    if not future.done():  # the asker may have left
        future.set_result(answer)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
