"""The workers: every key is answered exactly once, whatever the storage does."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from app.hicache.storage.base import (
    NO_DEADLINE,
    Deadline,
    Got,
    HiCacheStorage,
    Operation,
    Outcome,
    PageKey,
    Parts,
)
from app.hicache.storage.chunks import Arrival, Ticket
from app.hicache.storage.doubles import (
    CorruptStorage,
    FailingStorage,
    FullStorage,
    LateStorage,
    RaisingStorage,
    SilentStorage,
    SlowStorage,
    StorageDouble,
    cut,
    flipped_bit,
    lengthened,
    of_another_model,
)
from app.hicache.storage.memory import MemoryStorage
from app.hicache.storage.workers import StorageWorkers, WorkerLimits
from tests.support.storage import IDENTITY, PAYLOAD_BYTES, codec, key, payload, soon, value

LIMIT_S = 60
OTHER_WEIGHTS = of_another_model(replace(IDENTITY, weights="other"), key(1))


class PatientStorage(StorageDouble):
    """Does what it was asked to, however late it is."""

    def set(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        return self._inner.set(values, NO_DEADLINE)

    def get(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Got]:
        return self._inner.get(keys, NO_DEADLINE)


class Desk:
    """One caller of the workers: asks, and looks at the answers in the order of its questions."""

    def __init__(self, workers: StorageWorkers) -> None:
        self.workers = workers
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._asked: list[Ticket] = []
        self._seen: dict[Ticket, dict[int, Got]] = {}

    def set(self, *numbers: int, deadline: float | None = None) -> Ticket:
        pages = [payload(number) for number in numbers]
        return self.asked(self.workers.set(codec(), keys(numbers), pages, self.arrivals.put, deadline or soon()))

    def get(self, *numbers: int, deadline: float | None = None) -> Ticket:
        return self.asked(self.workers.get(codec(), keys(numbers), self.arrivals.put, deadline or soon()))

    def exists(self, *numbers: int) -> Ticket:
        return self.asked(self.workers.exists(keys(numbers), self.arrivals.put, soon()))

    def delete(self, *numbers: int) -> Ticket:
        return self.asked(self.workers.delete(keys(numbers), self.arrivals.put, soon()))

    def asked(self, ticket: Ticket) -> Ticket:
        self._asked.append(ticket)
        return ticket

    def answers(self, num_keys: int) -> list[Got]:
        """To the oldest question that was not looked at, in the order of its keys; each key is answered once."""
        ticket = self._asked.pop(0)
        while len(self._seen.get(ticket, {})) < num_keys:
            arrival = self.arrivals.get(timeout=LIMIT_S)
            seen = self._seen.setdefault(arrival.ticket, {})
            new = dict(enumerate(arrival.results, arrival.first))
            assert not new.keys() & seen.keys()
            seen |= new
        answers = self._seen.pop(ticket)
        return [answers[index] for index in range(num_keys)]

    def outcomes(self, num_keys: int) -> list[Outcome]:
        return [each.outcome for each in self.answers(num_keys)]

    def pages(self, num_keys: int) -> dict[int, bytes]:
        """The payloads that came, by the position of their keys."""
        answers = enumerate(self.answers(num_keys))
        return {index: bytes(each.value) for index, each in answers if each.value is not None}


def keys(numbers: Sequence[int]) -> list[PageKey]:
    return [key(number) for number in numbers]


@pytest.fixture
def memory() -> MemoryStorage:
    return MemoryStorage(2**20)


@pytest.fixture
def desk() -> Iterator[Callable[..., Desk]]:
    """Opens workers over a storage. After the test each is closed; every key was answered once."""
    desks: list[Desk] = []

    def opening(storage: HiCacheStorage, **limits: object) -> Desk:
        small = {"concurrency": 2, "pages_per_call": 2, "keys_per_call": 2, "backoff_s": 0.001}
        chosen = WorkerLimits(**{**small, **limits})  # type: ignore[arg-type]
        desks.append(Desk(StorageWorkers(storage, chosen)))
        return desks[-1]

    yield opening
    for each in desks:
        each.workers.check_integrity()
        left = each.workers.close(10)
        assert (left.queued_reads, left.queued_writes, left.queued_bytes, left.running) == (0, 0, 0, 0)
        each.workers.check_integrity()


def test_what_was_written_is_read(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(memory)

    mine.set(*range(5))
    assert mine.outcomes(5) == [Outcome.STORED] * 5
    mine.get(3, 7, 0)

    assert mine.pages(3) == {0: payload(3), 2: payload(0)}
    counters = mine.workers.counters()
    assert counters.outcomes[Operation.SET] == Counter({Outcome.STORED: 5})
    assert counters.outcomes[Operation.GET] == Counter({Outcome.HIT: 2, Outcome.ABSENT: 1})
    assert (counters.written_bytes, counters.read_bytes) == (5 * PAYLOAD_BYTES, 2 * PAYLOAD_BYTES)
    assert counters.latency[Operation.GET].num_calls == 2
    assert counters.latency[Operation.SET].num_calls == 3
    assert counters.latency[Operation.GET].quantile_us(0.5) > 0
    assert memory.get([key(3)], soon())[0].value == value(3)


def test_what_is_there_is_not_written_again(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(memory)
    mine.set(1)
    mine.outcomes(1)

    mine.set(1, 2)

    assert mine.outcomes(2) == [Outcome.PRESENT, Outcome.STORED]
    assert mine.workers.counters().written_bytes == 2 * PAYLOAD_BYTES


def test_exists_and_delete(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(memory)
    mine.set(1, 2)
    mine.outcomes(2)

    mine.delete(1, 3)
    assert mine.outcomes(2) == [Outcome.DELETED, Outcome.ABSENT]
    mine.exists(1, 2)

    assert mine.outcomes(2) == [Outcome.ABSENT, Outcome.HIT]


@pytest.mark.parametrize(
    ("damage", "outcome"),
    [
        (flipped_bit, Outcome.DAMAGED),
        (cut, Outcome.SHORT),
        (lengthened, Outcome.LONG),
        (OTHER_WEIGHTS, Outcome.FOREIGN),
    ],
)
def test_a_bad_value_is_a_miss_and_makes_room_for_a_good_one(
    desk: Callable[..., Desk], memory: MemoryStorage, damage: Callable[[bytes], bytes], outcome: Outcome
) -> None:
    mine = desk(CorruptStorage(memory, damage))
    memory.set([(key(1), (value(1),))], soon())

    mine.get(1)
    assert mine.outcomes(1) == [outcome]

    assert memory.exists([key(1)], soon()) == [Outcome.ABSENT]
    mine.set(1)
    assert mine.outcomes(1) == [Outcome.STORED]
    assert not mine.workers.load().breaker_open


def test_pages_are_told_as_they_come_not_at_the_end(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    memory.set([(key(number), (value(number),)) for number in range(4)], soon())
    late = LateStorage(memory, num_calls=1)  # the second call frees the first; the second hangs
    mine = desk(late)

    mine.get(0, 1, 2, 3)
    first = mine.arrivals.get(timeout=LIMIT_S)

    assert (first.first, [bytes(each.value or b"") for each in first.results]) == (0, [payload(0), payload(1)])
    assert mine.workers.load().running == 1
    late.release()
    assert mine.arrivals.get(timeout=LIMIT_S).first == 2


def test_a_storage_late_by_some_calls_mixes_nothing_up(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    memory.set([(key(number), (value(number),)) for number in range(12)], soon())
    late = LateStorage(memory, num_calls=2)
    mine = desk(late, concurrency=4)

    mine.get(*range(8, 12), *range(8))
    assert wait_until(lambda: mine.arrivals.qsize() == 4)  # the last two calls wait for others that never come
    late.release()
    pages = mine.pages(12)

    assert pages == {index: payload(number) for index, number in enumerate([*range(8, 12), *range(8)])}


def test_a_storage_that_never_answers_costs_a_miss_by_the_deadline(
    desk: Callable[..., Desk], memory: MemoryStorage
) -> None:
    memory.set([(key(1), (value(1),))], soon())
    silent = SilentStorage(memory)
    mine = desk(silent, max_failures=100)

    mine.get(1, 2, 3, deadline=time.monotonic() + 0.05)
    mine.set(4, deadline=time.monotonic() + 0.05)

    assert mine.outcomes(3) + mine.outcomes(1) == [Outcome.LATE] * 4
    assert mine.workers.load().given_up == 2
    silent.release()
    assert wait_until(lambda: mine.workers.load().given_up == 0)
    assert mine.workers.counters().num_too_late >= 3
    mine.get(1)
    assert mine.outcomes(1) == [Outcome.HIT]
    assert mine.arrivals.empty()


def test_a_storage_that_is_too_slow_is_late_and_its_answer_is_dropped(
    desk: Callable[..., Desk], memory: MemoryStorage
) -> None:
    memory.set([(key(1), (value(1),))], soon())
    mine = desk(SlowStorage(PatientStorage(memory), 0.1))

    mine.get(1, deadline=time.monotonic() + 0.02)

    assert mine.outcomes(1) == [Outcome.LATE]
    assert wait_until(lambda: mine.workers.counters().num_too_late == 1)
    mine.get(1)
    assert mine.outcomes(1) == [Outcome.HIT]
    assert mine.arrivals.empty()


def test_what_waits_behind_a_storage_that_never_answers_is_late_as_well(
    desk: Callable[..., Desk], memory: MemoryStorage
) -> None:
    silent = SilentStorage(memory)
    mine = desk(silent, concurrency=1, max_failures=100)
    mine.get(1)
    silent.called.wait()

    behind = Desk(mine.workers)
    behind.get(2, deadline=time.monotonic() + 0.05)

    assert behind.outcomes(1) == [Outcome.LATE]
    silent.release()
    assert mine.outcomes(1) == [Outcome.ABSENT]


def test_the_callers_bytes_are_free_when_a_write_is_given_up(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    silent = SilentStorage(PatientStorage(memory))
    mine = desk(silent, max_failures=100)
    page = bytearray(payload(1))

    mine.asked(mine.workers.set(codec(), [key(1)], [page], mine.arrivals.put, time.monotonic() + 0.05))
    assert mine.outcomes(1) == [Outcome.LATE]
    page[:] = bytes(len(page))
    silent.release()
    assert mine.workers.wait_idle(LIMIT_S)
    assert wait_until(lambda: mine.workers.load().running == 0)

    (got,) = memory.get([key(1)], soon())
    assert got.value == value(1)


def test_faults_are_tried_again(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    memory.set([(key(1), (value(1),))], soon())
    failing = FailingStorage(memory, num_failures=2)
    mine = desk(failing, max_attempts=3)

    mine.get(1)

    assert mine.outcomes(1) == [Outcome.HIT]
    assert (mine.workers.counters().num_retries, failing.num_calls) == (2, 3)


def test_tries_come_to_an_end(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    failing = FailingStorage(memory, num_failures=1000)
    mine = desk(failing, max_attempts=3)

    mine.get(1)

    assert mine.outcomes(1) == [Outcome.FAULT]
    assert failing.num_calls == 3


def test_what_will_not_change_is_not_tried_again(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(FullStorage(memory), max_failures=1)

    mine.set(1, 2)

    assert mine.outcomes(2) == [Outcome.FULL] * 2
    counters = mine.workers.counters()
    assert (counters.num_retries, counters.outcomes[Operation.SET][Outcome.FULL]) == (0, 2)
    assert not mine.workers.load().breaker_open


def test_the_breaker_opens_and_a_probe_closes_it(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    memory.set([(key(1), (value(1),))], soon())
    failing = FailingStorage(memory, num_failures=2)
    mine = desk(failing, concurrency=1, max_attempts=1, max_failures=2, pause_s=0.05)
    for _ in range(2):
        mine.get(1)
        assert mine.outcomes(1) == [Outcome.FAULT]

    mine.get(1)
    mine.set(2)
    assert mine.outcomes(1) + mine.outcomes(1) == [Outcome.BREAKER_OPEN] * 2
    assert (failing.num_calls, mine.workers.load().breaker_open) == (2, True)

    assert wait_until(lambda: not mine.workers.load().breaker_open)
    mine.get(1)
    assert mine.outcomes(1) == [Outcome.HIT]


def test_a_storage_that_is_always_late_opens_the_breaker(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    silent = SilentStorage(memory)
    mine = desk(silent, max_failures=2, pause_s=LIMIT_S)

    mine.get(1, 2, 3, 4, deadline=time.monotonic() + 0.05)
    assert mine.outcomes(4) == [Outcome.LATE] * 4

    assert mine.workers.load().breaker_open
    mine.get(1)
    assert mine.outcomes(1) == [Outcome.BREAKER_OPEN]
    silent.release()


def test_answers_that_come_too_late_do_not_close_the_breaker(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(SlowStorage(PatientStorage(memory), 0.03), concurrency=1, max_failures=3, pause_s=LIMIT_S)

    for _ in range(50):  # a few more than three, as some may be late before they are begun
        mine.get(1, deadline=time.monotonic() + 0.01)
        assert mine.outcomes(1)[0] in (Outcome.LATE, Outcome.BREAKER_OPEN)
        assert wait_until(lambda: mine.workers.load().running == 0)

    assert mine.workers.load().breaker_open


def test_a_backend_that_raises_is_a_fault(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(RaisingStorage(memory), max_attempts=1)

    with capture_logs() as logs:
        mine.get(1, 2)
        mine.set(3)
        assert mine.outcomes(2) + mine.outcomes(1) == [Outcome.FAULT] * 3
        assert mine.workers.wait_idle(LIMIT_S)

    assert {each["event"] for each in logs} == {"storage_backend_raised"}


def test_a_callback_that_raises_harms_nobody(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(memory)

    def raising(_arrival: Arrival) -> None:
        raise RuntimeError("a bug of the caller's")

    with capture_logs() as logs:
        mine.workers.get(codec(), [key(1)], raising, soon())
        assert mine.workers.wait_idle(LIMIT_S)

    assert [each["event"] for each in logs] == ["storage_callback_failed"]
    assert mine.workers.counters().num_callback_errors == 1
    mine.get(1)
    assert mine.outcomes(1) == [Outcome.ABSENT]


@pytest.mark.parametrize(
    "limits",
    [{"max_queued_chunks": 2}, {"max_queued_bytes": 2 * 2 * (PAYLOAD_BYTES + 112)}],
)
def test_a_full_queue_drops_the_newest_write_and_refuses_reads(
    desk: Callable[..., Desk], memory: MemoryStorage, limits: dict[str, int]
) -> None:
    silent = SilentStorage(memory)
    mine = desk(silent, concurrency=1, **limits)
    mine.get(99)
    silent.called.wait()
    reader = Desk(mine.workers)

    mine.set(0, 1, 2, 3)  # two chunks: the queue is full
    mine.set(4, 5)
    reader.get(6, 7, 8, 9, 10, 11)

    assert mine.arrivals.get(timeout=LIMIT_S).results[0].outcome is Outcome.QUEUE_FULL
    assert reader.arrivals.get(timeout=LIMIT_S)[1:] == (4, [(Outcome.QUEUE_FULL, None)] * 2)
    mine.workers.check_integrity()
    silent.release()
    assert mine.workers.wait_idle(LIMIT_S)
    assert memory.exists([key(number) for number in range(6)], soon()) == [Outcome.HIT] * 4 + [Outcome.ABSENT] * 2
    counters = mine.workers.counters()
    assert counters.outcomes[Operation.SET] == Counter({Outcome.STORED: 4, Outcome.QUEUE_FULL: 2})
    assert counters.outcomes[Operation.GET] == Counter({Outcome.ABSENT: 5, Outcome.QUEUE_FULL: 2})


def test_an_empty_queue_takes_what_is_larger_than_its_bound(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(memory, max_queued_bytes=1)

    mine.set(0, 1)
    assert mine.outcomes(2) == [Outcome.STORED] * 2
    mine.get(0, 1)

    assert mine.outcomes(2) == [Outcome.HIT] * 2


def test_reads_go_before_writes(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    silent = SilentStorage(memory)
    mine = desk(silent, concurrency=1)
    mine.get(99)
    silent.called.wait()

    writing = mine.set(1)
    reading = mine.get(2)
    silent.release()

    order = [mine.arrivals.get(timeout=LIMIT_S).ticket for _ in range(3)]
    assert order[1:] == [reading, writing]


def test_cancel_gives_up_what_has_not_come(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    silent = SilentStorage(memory)
    mine = desk(silent, concurrency=1)
    reading = mine.get(1, 2, 3)
    silent.called.wait()
    writing = mine.set(4)

    mine.workers.cancel(reading)
    assert mine.outcomes(3) == [Outcome.CANCELLED] * 3
    mine.workers.cancel(writing)
    assert mine.outcomes(1) == [Outcome.CANCELLED]
    mine.workers.cancel(writing)
    mine.workers.check_integrity()

    silent.release()
    mine.get(5)
    assert mine.outcomes(1) == [Outcome.ABSENT]
    assert memory.exists([key(4)], soon()) == [Outcome.ABSENT]
    assert mine.arrivals.empty()


def test_a_write_under_way_ends_although_it_is_cancelled(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    silent = SilentStorage(memory)
    mine = desk(silent)
    writing = mine.set(1)
    silent.called.wait()

    mine.workers.cancel(writing)
    silent.release()

    assert mine.outcomes(1) == [Outcome.STORED]


def test_a_probe_that_is_cancelled_does_not_keep_the_breaker_open(
    desk: Callable[..., Desk], memory: MemoryStorage
) -> None:
    silent = SilentStorage(memory)
    mine = desk(silent, concurrency=1, max_failures=1, pause_s=0.01)
    mine.get(1, deadline=time.monotonic() + 0.02)
    assert mine.outcomes(1) == [Outcome.LATE]
    assert wait_until(lambda: not mine.workers.load().breaker_open)

    probing = mine.get(2)
    mine.workers.cancel(probing)
    assert mine.outcomes(1) == [Outcome.CANCELLED]
    silent.release()

    assert wait_until(lambda: mine.workers.load().running == 0)
    mine.get(3)
    assert mine.outcomes(1) == [Outcome.ABSENT]


def test_close_writes_what_is_queued(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(memory, concurrency=1)
    mine.set(*range(40))

    left = mine.workers.close(LIMIT_S)

    assert (left.queued_writes, left.running) == (0, 0)
    assert mine.outcomes(40) == [Outcome.STORED] * 40
    mine.set(41)
    mine.get(1)
    assert mine.outcomes(1) + mine.outcomes(1) == [Outcome.CLOSED] * 2


def test_close_drops_what_it_cannot_write_in_time(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    silent = SilentStorage(memory)
    mine = desk(silent, concurrency=1)
    mine.set(0)
    silent.called.wait()
    mine.set(1, 2)
    reader = Desk(mine.workers)
    reader.get(5)

    left = mine.workers.close(0.05)

    assert mine.outcomes(1) + mine.outcomes(2) == [Outcome.CLOSED] * 3
    assert reader.outcomes(1) == [Outcome.CLOSED]
    assert (left.queued_writes, left.queued_bytes, left.given_up) == (0, 0, 1)
    assert mine.workers.counters().outcomes[Operation.SET] == Counter({Outcome.CLOSED: 3})
    silent.release()
    assert wait_until(lambda: mine.workers.load().running == 0)
    assert memory.exists([key(0), key(1)], soon()) == [Outcome.HIT, Outcome.ABSENT]


def test_pages_of_a_wrong_size_are_refused_before_anything_is_queued(
    desk: Callable[..., Desk], memory: MemoryStorage
) -> None:
    mine = desk(memory)

    with pytest.raises(ValueError, match="2 keys need as many pages of 1000 bytes, not \\[3\\]"):
        mine.workers.set(codec(), [key(1), key(2)], [payload(1), b"bad"], mine.arrivals.put, soon())
    with pytest.raises(ValueError, match="2 keys"):
        mine.workers.set(codec(), [key(1), key(2)], [payload(1)], mine.arrivals.put, soon())


def test_many_callers_at_once_each_get_their_own(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    one = desk(memory, concurrency=4, pages_per_call=3)
    wrong: list[object] = []

    def work(number: int) -> None:
        mine = Desk(one.workers)
        numbers = [100 * number + each for each in range(10)]
        for _ in range(5):
            mine.set(*numbers)
            mine.outcomes(10)
            mine.get(*numbers)
            pages = mine.pages(10)
            if pages != {index: payload(each) for index, each in enumerate(numbers)}:
                wrong.append(pages.keys())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert one.workers.counters().outcomes[Operation.GET] == Counter({Outcome.HIT: 300})


def test_spent_deadlines_do_not_pile_up(desk: Callable[..., Desk], memory: MemoryStorage) -> None:
    mine = desk(memory)
    for _ in range(1000):
        mine.get(1, deadline=float("inf"))
        mine.outcomes(1)

    assert len(mine.workers._deadlines) < 600


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether it comes true."""
    give_up = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.002)
    return True
