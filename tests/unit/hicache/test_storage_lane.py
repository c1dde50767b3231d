"""The storage lane: every number ends exactly once, whatever the storage does and whenever it comes and goes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.core.transfers import Fetch, Lookup, OfEachPool, PageKeys, Store
from app.errors import ConfigError, OwnershipError
from app.hicache.ports import LaneEnd
from app.hicache.storage.base import HiCacheStorage, Operation, Outcome
from app.hicache.storage.doubles import (
    CorruptStorage,
    FailingStorage,
    FullStorage,
    LateStorage,
    RaisingStorage,
    SilentStorage,
    SlowStorage,
    cut,
    flipped_bit,
    lengthened,
    of_another_model,
)
from app.hicache.storage.file import FileStorage
from app.hicache.storage.inspection import verified_values
from app.hicache.storage.memory import MemoryStorage
from app.hicache.storage.workers import WorkerLimits
from app.hicache.storage_lane import WorkersLane
from tests.support.byte_pages import BYTES
from tests.support.storage import IDENTITY, key, soon

PAGE_BYTES = OfEachPool(100, 60, 0)
IDENTITIES = OfEachPool(IDENTITY, replace(IDENTITY, layout="window"), replace(IDENTITY, layout="states"))
LIMIT_S = 60.0
FORMS = OfEachPool(BYTES, BYTES, BYTES)


def keys_of(*counts: int, first: int = 0) -> PageKeys:
    """Of pages first, first + 1, ...: so many of each pool, under the same hashes."""
    return PageKeys(*(tuple(key(first + index) for index in range(count)) for count in counts))


def payload(kind: int, page_key: bytes, size: int) -> np.ndarray:
    """Bytes that belong to no other kind or key."""
    repeated = (bytes([kind]) + page_key) * (size // 33 + 1)
    return np.frombuffer(repeated[:size], np.uint8)


def contents_of(keys: PageKeys) -> OfEachPool[Any]:
    return OfEachPool(
        *([(payload(kind, each, PAGE_BYTES[kind]),) for each in of_kind] for kind, of_kind in enumerate(keys))
    )


class Dispatcher:
    """The thread that dispatches: begins transfers, and takes their ends when it is woken."""

    def __init__(self, lane: WorkersLane) -> None:
        self.lane = lane
        self.awake = threading.Event()
        self.ends: dict[int, LaneEnd] = {}
        self.begun: set[int] = set()
        lane.wake_with(self.awake)

    def store(self, number: int, keys: PageKeys) -> None:
        self.begun.add(number)
        self.lane.store(Store(number=number, keys=keys, source=()), contents_of(keys))  # type: ignore[arg-type]

    def lookup(self, number: int, keys: PageKeys, deadline_s: float = LIMIT_S) -> None:
        self.begun.add(number)
        self.lane.lookup(Lookup(number=number, keys=keys, deadline_s=deadline_s))

    def fetch(self, number: int, keys: PageKeys, deadline_s: float = LIMIT_S) -> None:
        self.begun.add(number)
        self.lane.fetch(Fetch(number=number, keys=keys, deadline_s=deadline_s))

    def end(self, number: int) -> LaneEnd:
        """Waits for it, without looking before it is woken."""
        while number not in self.ends:
            assert self.awake.wait(LIMIT_S), "nobody woke the dispatcher"
            self.awake.clear()
            self.take()
        return self.ends[number]

    def take(self) -> None:
        for each in self.lane.take_ends():
            assert each.end.number in self.begun
            assert each.end.number not in self.ends, "told twice"
            self.ends[each.end.number] = each


@pytest.fixture
def at() -> Iterator[Callable[..., Dispatcher]]:
    """Opens lanes over a storage. After the test each is closed, and every number that was begun has ended once."""
    opened: list[Dispatcher] = []

    def opening(storage: HiCacheStorage | None = None, forms: Any = FORMS, **limits: object) -> Dispatcher:
        small = {"concurrency": 2, "pages_per_call": 2, "keys_per_call": 2, "backoff_s": 0.001}
        chosen = WorkerLimits(**{**small, **limits})  # type: ignore[arg-type]
        lane = WorkersLane(page_bytes=PAGE_BYTES, identities=IDENTITIES, forms=forms, limits=chosen)
        if storage is not None:
            lane.attach(storage)
        opened.append(Dispatcher(lane))
        return opened[-1]

    yield opening
    for each in opened:
        each.lane.check_integrity()
        each.lane.close(10)
        each.lane.check_integrity()
        each.take()
        assert each.ends.keys() == each.begun
        assert each.lane.num_under_way == 0


@pytest.fixture
def memory() -> MemoryStorage:
    return MemoryStorage(2**20)


def until_stored(memory: MemoryStorage, count: int) -> None:
    time_limit = time.monotonic() + LIMIT_S
    while memory.usage().num_values < count:
        assert time.monotonic() < time_limit
        time.sleep(0.001)


def flags(end: LaneEnd) -> list[list[bool]]:
    assert end.end.arrived is not None
    return [each.tolist() for each in end.end.arrived]


# -- what it does ------------------------------------------------------------------------------------------------------


def test_three_kinds_of_pages_of_the_same_hashes_are_three_values(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    mine, keys = at(memory), keys_of(5, 3, 1)

    mine.store(1, keys)
    assert mine.end(1).end.failure is None
    mine.lookup(2, keys_of(6, 4, 2))
    mine.fetch(3, keys)

    assert memory.usage().num_values == 9
    assert flags(mine.end(1)) == [[True] * 5, [True] * 3, [True]]
    assert mine.end(1).end.num_bytes == 5 * 100 + 3 * 60
    assert flags(mine.end(2)) == [[True] * 5 + [False], [True] * 3 + [False], [True, False]]
    assert mine.end(2).end.failure is None
    fetched = mine.end(3)
    assert (fetched.end.failure, fetched.end.num_bytes) == (None, 5 * 100 + 3 * 60)
    assert fetched.contents is not None
    for mine_back, stored in zip(fetched.contents, contents_of(keys), strict=True):
        assert [None if each is None else each[0].tolist() for each in mine_back] == [
            each[0].tolist() for each in stored
        ]
    assert fetched.end.seconds > 0


def test_what_is_missing_is_told_key_by_key(at: Callable[..., Dispatcher], memory: MemoryStorage) -> None:
    mine = at(memory)
    mine.store(1, keys_of(2, 0, 0))
    mine.end(1)

    mine.fetch(2, keys_of(3, 1, 0))

    end = mine.end(2)
    assert flags(end) == [[True, True, False], [False], []]
    assert end.end.failure == "absent"
    assert end.contents is not None
    assert [each is None for each in end.contents.pages] == [False, False, True]


def test_what_is_there_already_counts_as_stored(at: Callable[..., Dispatcher], memory: MemoryStorage) -> None:
    mine = at(memory)
    mine.store(1, keys_of(2, 0, 0))
    mine.end(1)

    mine.store(2, keys_of(2, 0, 0))

    assert mine.end(2).end.failure is None
    assert flags(mine.end(2))[0] == [True, True]
    assert mine.end(2).end.num_bytes == 0
    assert mine.lane.counters().outcomes[Operation.SET] == {Outcome.STORED: 2, Outcome.PRESENT: 2}


def test_a_transfer_of_nothing_ends_at_once(at: Callable[..., Dispatcher], memory: MemoryStorage) -> None:
    mine = at(memory)
    mine.fetch(1, PageKeys())

    assert mine.end(1).end.failure is None


def test_a_model_without_windows_has_no_such_keys(memory: MemoryStorage) -> None:
    lane = WorkersLane(page_bytes=PAGE_BYTES, identities=OfEachPool(IDENTITY, None, None), forms=FORMS)
    lane.attach(memory)

    with pytest.raises(ValueError, match="no window_pages"):
        lane.lookup(Lookup(number=1, keys=keys_of(1, 1, 0), deadline_s=1))

    assert lane.num_under_way == 0
    lane.close(10)
    assert lane.take_ends() == []


def test_more_keys_than_pages_are_refused_before_anything_begins(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    mine = at(memory)

    with pytest.raises(ValueError, match="2 keys"):
        mine.lane.store(Store(number=1, keys=keys_of(2, 0, 0), source=()), contents_of(keys_of(1, 0, 0)))  # type: ignore[arg-type]

    assert memory.usage().num_values == 0


def test_a_page_that_has_no_right_bytes_is_not_stored_and_costs_no_other(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    mine = at(memory, pages_per_call=1)
    contents = contents_of(keys_of(2, 0, 0))._replace(pages=[(np.zeros(100, np.uint8),), (np.zeros(99, np.uint8),)])
    mine.begun.add(1)

    mine.lane.store(Store(number=1, keys=keys_of(2, 0, 0), source=()), contents)  # type: ignore[arg-type]

    assert (mine.end(1).end.failure, flags(mine.end(1))[0]) == ("fault", [True, False])
    assert memory.usage().num_values == 1


def test_a_page_that_cannot_be_made_of_its_bytes_is_a_miss(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    at(memory).store(1, keys_of(3, 1, 0))
    made: list[int] = []

    class Refusing:
        to_bytes = staticmethod(BYTES.to_bytes)

        def from_bytes(self, payload: np.ndarray) -> Any:
            made.append(payload.size)
            if len(made) == 2:
                raise MemoryError("no host memory")
            return BYTES.from_bytes(payload)

    mine = at(memory, forms=OfEachPool(Refusing(), BYTES, BYTES), concurrency=1)
    until_stored(memory, 4)

    mine.fetch(1, keys_of(3, 1, 0))

    end = mine.end(1)
    assert (end.end.failure, flags(end)) == ("fault", [[True, False, True], [True], []])
    assert end.end.num_bytes == 2 * 100 + 60
    assert end.contents is not None
    assert [each is None for each in end.contents.pages] == [False, True, False]


def test_pages_become_bytes_and_bytes_pages_in_threads_of_the_storage(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    threads: set[str] = set()

    class Noting:
        def to_bytes(self, content: Any) -> np.ndarray:
            threads.add(threading.current_thread().name)
            return BYTES.to_bytes(content)

        def from_bytes(self, payload: np.ndarray) -> Any:
            threads.add(threading.current_thread().name)
            return BYTES.from_bytes(payload)

    mine = at(memory, forms=OfEachPool(Noting(), Noting(), Noting()))
    mine.store(1, keys_of(3, 1, 0))
    assert mine.end(1).end.failure is None
    stored_by = set(threads)
    threads.clear()
    mine.fetch(2, keys_of(3, 1, 0))
    assert mine.end(2).end.failure is None

    for names in (stored_by, threads):
        assert names
        assert all(name.startswith("storage-") for name in names)


def test_a_number_is_used_once(at: Callable[..., Dispatcher], memory: MemoryStorage) -> None:
    silent = SilentStorage(memory)
    mine = at(silent)
    mine.lookup(1, keys_of(1, 0, 0))

    with pytest.raises(OwnershipError, match="number=1"):
        mine.lookup(1, keys_of(1, 0, 0))
    silent.release()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spoilt", "failure"),
    [
        (lambda memory: CorruptStorage(memory, flipped_bit), "damaged"),
        (lambda memory: CorruptStorage(memory, cut), "short"),
        (lambda memory: CorruptStorage(memory, lengthened), "long"),
        (lambda memory: CorruptStorage(memory, of_another_model(replace(IDENTITY, weights="o"), key(0))), "foreign"),
        (lambda memory: FailingStorage(memory, 99), "fault"),
        (lambda memory: RaisingStorage(memory), "fault"),
    ],
    ids=["bit", "cut", "longer", "other weights", "failing", "raising"],
)
def test_a_value_that_is_no_good_is_a_miss(
    at: Callable[..., Dispatcher],
    memory: MemoryStorage,
    spoilt: Callable[[HiCacheStorage], HiCacheStorage],
    failure: str,
) -> None:
    at(memory).store(1, keys_of(1, 0, 0))
    mine = at(spoilt(memory))
    until_stored(memory, 1)

    mine.fetch(1, keys_of(1, 0, 0))

    end = mine.end(1)
    assert (end.end.failure, flags(end)) == (failure, [[False], [], []])
    assert end.contents == OfEachPool([None], [], [])


def test_a_window_page_in_the_place_of_a_full_page_is_not_taken_for_it(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    """Even if somebody put it under that key."""
    mine = at(memory)
    mine.store(1, keys_of(0, 1, 0))
    mine.end(1)
    (value,) = [memory.get([each], soon())[0].value for each in IDENTITIES.window_pages.part_keys([key(0)])]
    assert value is not None
    memory.set([(key(0), (value,))], soon())

    mine.fetch(2, keys_of(1, 0, 0))

    assert mine.end(2).end.failure == "foreign"


def test_a_full_storage_stores_nothing_and_says_so(at: Callable[..., Dispatcher], memory: MemoryStorage) -> None:
    mine = at(FullStorage(memory))
    mine.store(1, keys_of(2, 0, 0))

    assert mine.end(1).end.failure == "full"
    assert flags(mine.end(1))[0] == [False, False]


def test_a_storage_that_never_answers_makes_everything_late(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    silent = SilentStorage(memory)
    mine = at(silent)

    mine.lookup(1, keys_of(3, 0, 0), deadline_s=0.05)
    mine.fetch(2, keys_of(3, 2, 1), deadline_s=0.05)

    assert mine.end(1).end.failure == "late"
    assert mine.end(2).end.failure == "late"
    silent.release()


def test_a_store_that_is_never_answered_is_given_up(memory: MemoryStorage) -> None:
    silent = SilentStorage(memory)
    lane = WorkersLane(page_bytes=PAGE_BYTES, identities=IDENTITIES, forms=FORMS, store_deadline_s=0.05)
    lane.attach(silent)
    mine = Dispatcher(lane)

    mine.store(1, keys_of(1, 0, 0))

    assert mine.end(1).end.failure == "late"
    silent.release()
    lane.close(10)


def test_answers_that_come_late_and_in_pieces_make_one_end(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    at(memory).store(1, keys_of(8, 4, 2))
    late = LateStorage(memory, 1)
    mine = at(late, concurrency=4)
    mine.fetch(1, keys_of(8, 4, 2))
    mine.lookup(2, keys_of(8, 4, 2))
    late.release()

    assert mine.end(1).end.arrived is not None
    assert mine.end(2).end.arrived is not None


def test_cancelling_ends_a_read_now_and_an_unknown_number_is_nothing(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    silent = SilentStorage(memory)
    mine = at(silent)
    mine.fetch(1, keys_of(4, 2, 1))
    assert silent.called.wait(LIMIT_S)

    mine.lane.cancel(1)
    mine.lane.cancel(77)

    assert mine.end(1).end.failure == "cancelled"
    mine.lane.cancel(1)
    silent.release()


def test_a_burst_of_stores_is_bounded_and_the_rest_is_told(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    """A slow worker, a thousand pages at once: what waits is bounded, and what is dropped ends at once."""
    silent = SilentStorage(memory)
    mine = at(silent, max_queued_chunks=20)
    for number in range(1000):
        mine.store(number, keys_of(1, 0, 0, first=number))

    load = mine.lane.load()
    assert load is not None
    assert load.queued_writes <= 20
    mine.take()
    dropped = [each.end.failure for each in mine.ends.values()]
    assert len(dropped) >= 1000 - 20 - 2
    assert set(dropped) == {"queue_full"}

    silent.release()
    mine.lane.close(30)
    mine.take()
    assert len(mine.ends) == 1000
    assert memory.usage().num_values == 1000 - len(dropped)


def test_closing_while_the_storage_hangs_is_bounded(memory: MemoryStorage) -> None:
    silent = SilentStorage(memory)
    lane = WorkersLane(page_bytes=PAGE_BYTES, identities=IDENTITIES, forms=FORMS, limits=WorkerLimits(concurrency=1))
    lane.attach(silent)
    mine = Dispatcher(lane)
    mine.store(1, keys_of(1, 0, 0))
    assert silent.called.wait(LIMIT_S)
    mine.store(2, keys_of(1, 1, 0, first=1))
    mine.fetch(3, keys_of(1, 0, 0))

    lane.close(0.05)
    lane.close(0.05)

    mine.take()
    assert {number: each.end.failure for number, each in mine.ends.items()} == dict.fromkeys((1, 2, 3), "closed")
    silent.release()


# -- a storage that comes and goes -------------------------------------------------------------------------------------


def test_without_a_storage_everything_ends_at_once(at: Callable[..., Dispatcher]) -> None:
    mine = at()
    mine.store(1, keys_of(2, 1, 1))
    mine.lookup(2, keys_of(2, 1, 1))
    mine.fetch(3, keys_of(2, 1, 1))
    mine.take()

    assert {each.end.failure for each in mine.ends.values()} == {"detached"}
    assert flags(mine.end(3)) == [[False] * 2, [False], [False]]
    assert mine.end(3).contents == OfEachPool([None] * 2, [None], [None])
    assert not mine.lane.is_attached
    assert mine.lane.load() is None
    with pytest.raises(ConfigError, match="attach"):
        mine.lane.clear(soon())


def test_detaching_writes_what_is_queued_and_another_storage_may_follow(at: Callable[..., Dispatcher]) -> None:
    first, second = MemoryStorage(2**20), MemoryStorage(2**20)
    mine = at(SlowStorage(first, 0.005), concurrency=1)
    for number in range(10):
        mine.store(number, keys_of(1, 0, 0, first=number))
    with pytest.raises(ConfigError, match="detach"):
        mine.lane.attach(second)

    mine.lane.detach(30)
    mine.store(10, keys_of(1, 0, 0))
    mine.lane.attach(second)
    mine.store(11, keys_of(1, 0, 0))

    assert [mine.end(number).end.failure for number in (0, 9, 10, 11)] == [None, None, "detached", None]
    assert (first.usage().num_values, second.usage().num_values) == (10, 1)


def test_clearing_removes_every_kind(at: Callable[..., Dispatcher], memory: MemoryStorage) -> None:
    mine = at(memory)
    mine.store(1, keys_of(3, 2, 1))
    mine.end(1)

    assert mine.lane.clear(soon()) == 6

    mine.lookup(2, keys_of(3, 2, 1))
    assert not any(map(any, flags(mine.end(2))))


def test_storages_come_go_and_are_cleared_by_another_thread_while_transfers_are_under_way(
    at: Callable[..., Dispatcher],
) -> None:
    """What a fetch brings is right in any case, and every number ends once."""
    mine = at()
    over = threading.Event()
    failed: list[BaseException] = []

    def administer() -> None:
        try:
            while not over.is_set():
                mine.lane.attach(MemoryStorage(2**20))
                time.sleep(0.002)
                mine.lane.clear(soon())
                time.sleep(0.002)
                mine.lane.detach(1)
        except BaseException as error:
            failed.append(error)

    admin = threading.Thread(target=administer)
    admin.start()
    try:
        for number in range(0, 900, 3):
            keys = keys_of(3, 2, 1, first=number % 7)
            mine.store(number, keys)
            mine.lookup(number + 1, keys)
            mine.fetch(number + 2, keys)
            if number % 5 == 0:
                mine.lane.cancel(number + 2)
            if number % 30 == 0:
                time.sleep(0.001)
            mine.lane.check_integrity()
        for number in range(900):
            end = mine.end(number)
            if end.contents is not None:
                wanted = contents_of(keys_of(3, 2, 1, first=(number - 2) % 7))
                for of_kind, right in zip(end.contents, wanted, strict=True):
                    for got, page in zip(of_kind, right, strict=True):
                        assert got is None or np.array_equal(got[0], page[0])
    finally:
        over.set()
        admin.join(LIMIT_S)
    assert not failed
    assert len(mine.ends) == 900


def test_an_end_that_is_there_already_wakes_who_comes_later(
    at: Callable[..., Dispatcher], memory: MemoryStorage
) -> None:
    mine = at(memory)
    mine.lookup(1, keys_of(1, 0, 0))
    assert mine.awake.wait(LIMIT_S)
    later = threading.Event()

    mine.lane.wake_with(later)

    assert later.is_set()
    mine.take()


def test_the_offline_check_accepts_all_three_kinds_and_names_another_identity(tmp_path: Path) -> None:
    lane = WorkersLane(page_bytes=PAGE_BYTES, identities=IDENTITIES, forms=FORMS)
    lane.attach(FileStorage(tmp_path, 10**6))
    mine = Dispatcher(lane)
    mine.store(1, keys_of(2, 2, 2))
    assert mine.end(1).end.failure is None
    lane.close(30)

    values = list(verified_values(tmp_path))

    assert {value.outcome for value in values} == {Outcome.HIT}
    assert {value.identity for value in values} == {each.digest().hex() for each in IDENTITIES}
    assert len(values) == 6
