"""KV events over ZeroMQ, for routers: published as they happen, and sent again to whoever missed some.

engine's thread: publish ----- bounded queue -----> publisher's thread ---> PUB     subscribers
                                                      the last messages <--> ROUTER  who asks for them again
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

import structlog
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from app.config.kv_events_config import FLAG, KvEventsConfig, parse_kv_events_config
from app.errors import ConfigError
from app.observability.kv_event_stream import EVERYTHING_CLEARED, Happened, KvEventOutbox, encoded

_log = structlog.get_logger(__name__)

CLOSING_S = 1.0  # for what is queued, at shutdown
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class _Message(NamedTuple):
    sequence: int
    ts: float
    happened: list[Happened]


class KvEventPublisher(Collector):
    """Binds its sockets when it is made, ConfigError if it cannot; its thread runs until `close`.

    publish: for one thread, the engine's, after each step; it never waits. A message that does not fit the queue is
    dropped: its sequence number stays out, and the next message says first that everything was cleared, so that
    subscribers know less than there is, never more. What a subscriber is too slow for is lost to it alone.

    outbox: what it publishes. endpoint, replay_endpoint: as they were bound.
    num_published, num_dropped: events, so far; from any thread.
    """

    def __init__(self, config: KvEventsConfig, outbox: KvEventOutbox) -> None:
        zmq = _zmq()
        self.num_published = 0
        self.num_dropped = 0
        self.outbox = outbox
        self._max_queued = config.max_queue_size
        self._topic = config.topic.encode()
        self._queue: deque[_Message] = deque()
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)  # (sequence number, payload)
        self._next = 0
        self._has_gap = False
        self._closing_at: float | None = None
        self._zmq = zmq
        self._context = context = zmq.Context()
        try:
            self._pub = _open(zmq, context, zmq.PUB, config.endpoint, config.hwm, binds=_binds(config.endpoint))
            self._replay = None
            if config.replay_endpoint is not None:
                self._replay = _open(zmq, context, zmq.ROUTER, config.replay_endpoint, 0, binds=True)
        except ConfigError:
            context.destroy(linger=0)
            raise
        # Not a socket of ZeroMQ: there, one that is full may have been read already, and nobody would be woken.
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self.endpoint = _address(self._pub)
        self.replay_endpoint = None if self._replay is None else _address(self._replay)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    # -- on the engine's thread

    def publish(self) -> None:
        """What the tiers told since the last call, as one message. O(1) beside the list that it takes over."""
        happened = self.outbox.drain()
        if not happened:
            return
        sequence, self._next = self._next, self._next + 1
        if len(self._queue) >= self._max_queued:
            self.num_dropped += len(happened)
            self._has_gap = True
            return
        if self._has_gap:
            happened = [*EVERYTHING_CLEARED, *happened]
            self._has_gap = False
        self._queue.append(_Message(sequence, time.time(), happened))
        self._wake_up()

    # -- on any other

    def close(self) -> None:
        """Send what is queued, for CLOSING_S at most, and end. After the last `publish`. Idempotent."""
        if self._closing_at is not None:
            return
        self._closing_at = time.monotonic() + CLOSING_S
        self._wake_up()
        self._thread.join(CLOSING_S + 1.0)
        self._wake.close()

    def collect(self) -> Iterator[Metric]:
        """Prometheus' collector."""
        for name, text, value in (
            ("published", "KV events that were published", self.num_published),
            ("dropped", "KV events that were dropped because they could not be published in time", self.num_dropped),
        ):
            yield CounterMetricFamily(f"tpukv:kv_events_{name}", text, value=value)

    def _wake_up(self) -> None:
        with suppress(OSError):  # full: it is about to wake up anyway; closed: it has failed
            self._wake.send(b"\0")

    # -- on the publisher's thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        for source in filter(None, (self._woken, self._replay)):
            poller.register(source, self._zmq.POLLIN)
        try:
            while not self._is_over():
                ready = dict(poller.poll())
                if self._woken.fileno() in ready:
                    self._woken.recv(4096)
                self._send_queued()
                if self._replay in ready:
                    self._send_again()
        except Exception as error:
            _log.critical("kv_events_failed", error=repr(error), exc_info=error)
        finally:
            self._woken.close()
            self._context.destroy(linger=int(CLOSING_S * 500))

    def _is_over(self) -> bool:
        return self._closing_at is not None and (not self._queue or time.monotonic() >= self._closing_at)

    def _send_queued(self) -> None:
        while self._queue and not (self._closing_at is not None and time.monotonic() >= self._closing_at):
            sequence, ts, happened = self._queue.popleft()
            number, payload = sequence.to_bytes(8, "big"), encoded(ts, happened)
            self._pub.send_multipart((self._topic, number, payload))
            self._sent.append((number, payload))
            self.num_published += len(happened)

    def _send_again(self) -> None:
        """To one who asks: every message from a sequence number on that is still there, and then the end."""
        assert self._replay is not None
        *route, asked = self._replay.recv_multipart()
        if len(asked) != 8:
            _log.warning("kv_events_replay_refused", reason=f"{len(asked)} bytes instead of a sequence number of 8")
            return
        for number, payload in self._sent:
            if number >= asked:  # big-endian: in the order of the numbers
                self._replay.send_multipart((*route, number, payload))
        self._replay.send_multipart((*route, END_OF_REPLAY, b""))


@contextmanager
def opened_publisher(setting: str, page_size: int) -> Iterator[KvEventPublisher | None]:
    """What the value of the flag asks for, closed at the end; None for nothing."""
    config = parse_kv_events_config(setting)
    if config is None:
        yield None
        return
    with closing(KvEventPublisher(config, KvEventOutbox(page_size))) as publisher:
        _log.info("kv_events_published", endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)
        yield publisher


def _zmq() -> Any:
    try:
        import zmq
    except ImportError as error:
        allowed = f"its package cannot be imported: install requirements/events.txt ({error})"
        raise ConfigError(field=FLAG, value="zmq", allowed=allowed) from error
    return zmq


def _open(zmq: Any, context: Any, kind: int, endpoint: str, hwm: int, *, binds: bool) -> Any:
    """hwm: messages that may wait for one peer, 0 for any number."""
    opened = context.socket(kind)
    opened.set_hwm(hwm)
    opened.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        (opened.bind if binds else opened.connect)(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(field=FLAG, value=endpoint, allowed=f"an endpoint that can be had ({error})") from error
    return opened


def _address(opened: Any) -> str:
    return str(opened.last_endpoint.rstrip(b"\0").decode())


def _binds(endpoint: str) -> bool:
    """A wildcard and a loopback address are this machine's; any other is that of a router to connect to."""
    scheme, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or "*" in rest or host in ("localhost", "::", "0.0.0.0"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
