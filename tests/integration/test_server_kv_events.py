"""KV events over the wire: what a router hears is what the tiers hold."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import numpy as np
import pytest
from pytest_mock import MockerFixture

from app.config.http_args import HttpArgs
from app.config.kv_events_config import KvEventsConfig
from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey, page_hashes
from app.errors import ConfigError
from app.observability.kv_event_stream import KvEventOutbox, encoded
from app.server.kv_event_publisher import KvEventPublisher
from tests.support.asking import Asker, wait_until
from tests.support.event_listener import AllBlocksCleared, BlockRemoved, BlockStored, Listener, held
from tests.support.server import RunningServer, running_server

ANY_PORT = "tcp://127.0.0.1:*"
PAGE_SIZE = 4
PROMPTS = [[*range(first, first + 50)] for first in range(1, 9)]


def events_to(**fields: Any) -> dict[str, str]:
    config = {"publisher": "zmq", "endpoint": ANY_PORT, "replay_endpoint": ANY_PORT, "topic": "kv", **fields}
    return {"kv_events_config": json.dumps(config)}


def publisher_of(server: RunningServer) -> KvEventPublisher:
    assert server.publisher is not None
    return server.publisher


def all_heard(server: RunningServer, asker: Asker, listener: Listener) -> None:
    """Whatever happened so far, as soon as the engine is at rest; what came before the listener is asked for."""
    publisher, scheduler = publisher_of(server), server.parts.scheduler

    def is_idle() -> bool:
        return not scheduler.has_work() and not scheduler.has_background_work()

    def is_at_rest() -> bool:
        """Also after a whole turn of the engine, which publishes: read from here, it may look idle within a step."""
        return is_idle() and asker.http.get("/cache_state").is_success and is_idle()

    wait_until(is_at_rest)
    wait_until(lambda: not publisher._queue)
    assert publisher.replay_endpoint is not None
    listener.messages = listener.replayed(publisher.replay_endpoint, 0)


def tiers_hold(server: RunningServer, seed: bytes) -> dict[str, set[int]]:
    cache = server.parts.adapter._cache
    pages: dict[str, set[int]] = {}
    for name, tier in (("GPU", cache), ("CPU_PINNED", cache.tiers.host)):
        keys = [RadixKey.of(np.array(prompt, np.int32)) for prompt in PROMPTS]
        chains = [page_hashes(seed, key.raw, PAGE_SIZE)[: tier.num_present(key)] for key in keys]
        pages[name] = {int.from_bytes(page[-8:], "big") for chain in chains for page in chain}
    return pages


def storage_of(asker: Asker) -> dict[str, Any]:
    told = asker.http.get("/hicache/storage-backend").raise_for_status().json()
    assert isinstance(told, dict)
    return told


def test_a_listener_knows_what_each_tier_holds() -> None:
    tiers = {
        "cache_type": None,
        "enable_hierarchical_cache": True,
        "hicache_write_policy": "write_through",
        "hicache_ratio": 2.0,
        "hicache_storage_backend": "memory",
        "max_total_tokens": 160,
    }
    with running_server(http=events_to(), **tiers) as server, Asker(server.url) as asker:
        publisher = publisher_of(server)
        with Listener(publisher.endpoint, "kv") as listener:
            # when: more than device and host hold
            for prompt in PROMPTS:
                asker.whole(prompt=prompt, max_tokens=1)
            all_heard(server, asker, listener)

            # then
            assert server.parts.tiers is not None
            known = held(listener.messages.values())
            assert {name: known[name] for name in ("GPU", "CPU_PINNED")} == tiers_hold(
                server, server.parts.tiers.seed(DEFAULT_NAMESPACE)
            )
            assert len(known["CPU_PINNED"]) > len(known["GPU"]) > 0
            assert len(known["EXTERNAL"]) == storage_of(asker)["usage"]["num_values"] > 0
            events = [event for batch in listener.messages.values() for event in batch.events]
            assert {type(event) for event in events} >= {BlockStored, BlockRemoved}
            stored = next(event for event in events if isinstance(event, BlockStored))
            assert (stored.block_size, len(stored.token_ids)) == (PAGE_SIZE, PAGE_SIZE * len(stored.block_hashes))
            assert all(batch.data_parallel_rank == 0 for batch in listener.messages.values())

            # when: device and host are emptied, without a step
            asker.http.post("/flush_cache").raise_for_status()
            all_heard(server, asker, listener)

            # then
            emptied = held(listener.messages.values())
            assert {name: emptied[name] for name in ("GPU", "CPU_PINNED")} == {"GPU": set(), "CPU_PINNED": set()}
            assert emptied["EXTERNAL"] == known["EXTERNAL"]

            # when
            asker.http.delete("/hicache/storage-backend").raise_for_status()
            all_heard(server, asker, listener)
            assert not held(listener.messages.values())["EXTERNAL"]

            figures = asker.metrics()
            assert figures["tpukv:kv_events_published_total"] >= len(events)
            assert figures["tpukv:kv_events_dropped_total"] == 0


def test_messages_come_in_order_under_the_topic_and_can_be_asked_for_again() -> None:
    with running_server(http=events_to(buffer_steps=3)) as server, Asker(server.url) as asker:
        publisher = publisher_of(server)
        with Listener(publisher.endpoint, "kv") as listener, Listener(publisher.endpoint, "other") as other:
            number = 0
            while not listener.receive_some(0.05):  # a subscription takes its time
                asker.whole(prompt=[number % 200 + 1] * 9, max_tokens=1)
                number += 1

            # when
            first = min(listener.messages)
            for prompt in PROMPTS:
                asker.whole(prompt=prompt, max_tokens=1)
            wait_until(lambda: not publisher._queue)
            last = publisher._next - 1
            listener.receive_to(last)

            # then
            assert listener.topics == {b"kv"}
            assert list(listener.messages) == list(range(first, last + 1))
            assert publisher.replay_endpoint is not None
            again = listener.replayed(publisher.replay_endpoint, last - 1)
            assert again == {each: listener.messages[each] for each in (last - 1, last)}
            assert list(listener.replayed(publisher.replay_endpoint, 0)) == [last - 2, last - 1, last]
            assert listener.replayed(publisher.replay_endpoint, last + 1) == {}
            assert not other.receive_some(0.1)


def test_a_listener_that_never_reads_holds_up_nobody() -> None:
    with running_server(http=events_to(hwm=1)) as server, Asker(server.url) as asker:
        publisher = publisher_of(server)
        with Listener(publisher.endpoint, "kv", hwm=1):
            for prompt in PROMPTS:
                asker.whole(prompt=prompt, max_tokens=1)

            wait_until(lambda: not publisher._queue)
            assert publisher.num_dropped == 0
            assert publisher.num_published > 0


def test_nothing_is_noted_down_unless_it_is_asked_for() -> None:
    for config in ("", '{"publisher": "null"}', '{"enable_kv_cache_events": false}'):
        with running_server(http={"kv_events_config": config}) as server:
            assert server.publisher is None
            assert server.parts.adapter._cache._live_tree._events is None


# -- the publisher by itself -----------------------------------------------------------------------------------------


@contextmanager
def publishing(**fields: Any) -> Iterator[KvEventPublisher]:
    config = KvEventsConfig(endpoint=ANY_PORT, replay_endpoint=ANY_PORT, **fields)
    with closing(KvEventPublisher(config, KvEventOutbox(PAGE_SIZE))) as publisher:
        yield publisher


def test_what_does_not_fit_the_queue_leaves_a_gap_and_is_forgotten(mocker: MockerFixture) -> None:
    """The engine waits for nothing; a listener that overlooks the gap knows too little rather than too much."""
    # given: a thread that cannot go on
    begun, released = threading.Event(), threading.Event()

    def held_up(*args: Any) -> bytes:
        begun.set()
        assert released.wait(60)
        return encoded(*args)

    mocker.patch("app.server.kv_event_publisher.encoded", held_up)
    with publishing(max_queue_size=1) as publisher:
        sink = publisher.outbox.sink("host")

        # when
        for number in range(4):
            sink.removed(page_hashes=[bytes([number]) * 32])
            publisher.publish()
            assert begun.wait(60)
        assert publisher.num_dropped == 2
        released.set()
        wait_until(lambda: publisher.num_published == 2)
        sink.removed(page_hashes=[b"\4" * 32])
        publisher.publish()
        publisher.publish()  # nothing happened
        wait_until(lambda: publisher.num_published > 2)

        # then
        with Listener(publisher.endpoint) as listener:
            assert publisher.replay_endpoint is not None
            messages = listener.replayed(publisher.replay_endpoint, 0)
        assert list(messages) == [0, 1, 4]
        *cleared, removed = messages[4].events
        assert cleared == [AllBlocksCleared("EXTERNAL"), AllBlocksCleared("CPU_PINNED"), AllBlocksCleared()]
        assert removed == BlockRemoved([int.from_bytes(b"\4" * 8, "big")], "CPU_PINNED")


def test_an_adapter_and_a_parent_are_told() -> None:
    outbox = KvEventOutbox(2)
    sink = outbox.sink("device")
    hashes = [bytes([number]) * 32 for number in range(3)]
    namespace = Namespace(adapter="poet", salt="secret")

    sink.stored(
        namespace=namespace, parent_hash=hashes[0], page_hashes=hashes[1:], raw=np.arange(4, dtype=np.int32).tobytes()
    )

    with publishing() as publisher:
        publisher.outbox = outbox
        publisher.publish()
        wait_until(lambda: publisher.num_published == 1)
        with Listener(publisher.endpoint) as listener:
            assert publisher.replay_endpoint is not None
            (batch,) = listener.replayed(publisher.replay_endpoint, 0).values()
    short = [int.from_bytes(each[-8:], "big") for each in hashes]
    assert batch.events == [BlockStored(short[1:], short[0], [0, 1, 2, 3], 2, None, "GPU", "poet")]


def test_what_is_queued_is_sent_before_it_ends() -> None:
    with publishing() as publisher, Listener(publisher.endpoint) as listener:
        sink = publisher.outbox.sink("device")
        while not listener.receive_some(0.05):
            sink.cleared()
            publisher.publish()
        for _ in range(50):
            sink.cleared()
            publisher.publish()

        publisher.close()
        publisher.close()

        listener.receive_to(publisher._next - 1)
        assert not publisher._thread.is_alive()


@pytest.mark.parametrize(
    "config",
    [
        "zmq",
        "[]",
        '{"publisher": "kafka"}',
        '{"endpoints": "tcp://*:1"}',
        '{"endpoint": ""}',
        '{"hwm": 0}',
        '{"buffer_steps": "9"}',
    ],
)
def test_a_setting_that_is_none_is_refused_by_its_flag(config: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-config"):
        HttpArgs(kv_events_config=config)


def test_an_endpoint_that_cannot_be_had_is_refused() -> None:
    with publishing() as publisher:
        for taken in ({"endpoint": publisher.endpoint}, {"endpoint": ANY_PORT, "replay_endpoint": publisher.endpoint}):
            with pytest.raises(ConfigError, match=r"--kv-events-config.*endpoint"):
                KvEventPublisher(KvEventsConfig(**taken), KvEventOutbox(PAGE_SIZE))


def test_without_its_package_it_is_refused(mocker: MockerFixture) -> None:
    mocker.patch.dict(sys.modules, {"zmq": None})
    with pytest.raises(ConfigError, match=r"requirements/events\.txt"):
        KvEventPublisher(KvEventsConfig(), KvEventOutbox(PAGE_SIZE))
