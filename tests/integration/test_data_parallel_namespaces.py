"""Field report H29: with several data-parallel ranks only rank 0 is right about hits, events and slots.

The part that exists today: a request may name a data-parallel rank in its namespace, and one engine then keeps the
ranks apart as far as its cache goes. Engines side by side (--dp-size above 1), with a pool, a flush and metrics of
their own, are not built.
"""

from __future__ import annotations

from collections.abc import Callable

from dependency_injector import providers

from app.core.keys import Namespace
from app.observability.kv_events import BlockStored, KvEventRecorder, KvEventReplica
from tests.support.engine import Engine

OpenEngine = Callable[..., Engine]
PROMPT = range(20)
PAGE_SIZE = 4


def recorded(engine: OpenEngine) -> tuple[Engine, KvEventRecorder]:
    recorder = KvEventRecorder(page_size=PAGE_SIZE)
    return engine(page_size=PAGE_SIZE, overrides={"events": lambda _: providers.Object(recorder)}), recorder


def cached_tokens(opened: Engine, rank: int) -> int | None:
    request_id = opened.add(PROMPT, namespace=Namespace(dp_rank=rank), max_tokens=2)
    return opened.drain()[request_id].cached_tokens


def test_a_page_of_one_rank_is_never_matched_on_another(engine: OpenEngine) -> None:
    opened, _ = recorded(engine)

    first = [cached_tokens(opened, rank) for rank in (0, 1, 2)]
    again = [cached_tokens(opened, rank) for rank in (2, 1, 0)]

    assert first == [0, 0, 0]
    assert again == [16, 16, 16]
    opened.check_replies()


def test_every_rank_has_events_of_its_own_with_its_number(engine: OpenEngine) -> None:
    opened, recorder = recorded(engine)
    for rank in (0, 1):
        cached_tokens(opened, rank)

    stored = [event for event in recorder.drain() if isinstance(event, BlockStored)]

    hashes = {
        rank: {each for event in stored if event.dp_rank == rank for each in event.page_hashes} for rank in (0, 1)
    }
    assert {event.dp_rank for event in stored} == {0, 1}
    assert len(hashes[0]) == len(hashes[1]) == 20 // PAGE_SIZE
    assert not hashes[0] & hashes[1]


def test_a_rank_without_requests_holds_up_nobody_and_loses_nothing(engine: OpenEngine) -> None:
    # given: rank 1 has cached pages and nothing to do
    opened, _ = recorded(engine)
    cached_tokens(opened, 1)

    # when: rank 0 works alone, with a request running and others waiting behind it
    for number in range(4):
        opened.add([*PROMPT, number], namespace=Namespace(dp_rank=0), max_tokens=3)
    opened.drain()

    # then
    opened.check_replies()
    assert cached_tokens(opened, 1) == 16


def test_a_flush_drops_the_pages_of_all_ranks_and_says_so(engine: OpenEngine) -> None:
    opened, recorder = recorded(engine)
    for rank in (0, 1):
        cached_tokens(opened, rank)
    listener = KvEventReplica()
    listener.apply(recorder.drain())
    held = opened.cached_pages
    assert len(listener.page_hashes) == held > 0

    freed = opened.scheduler.flush_cache()

    listener.apply(recorder.drain())
    assert (freed, listener.page_hashes) == (held, set())
    assert [cached_tokens(opened, rank) for rank in (0, 1)] == [0, 0]
