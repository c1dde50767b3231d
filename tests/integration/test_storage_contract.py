"""What every storage backend does, whichever it is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.hicache.storage.base import HiCacheStorage, Outcome
from app.hicache.storage.registry import BUILTIN_BACKENDS, StorageConfig, open_storage
from tests.support.mooncake_master import mooncake_master, why_not
from tests.support.object_service import object_service
from tests.support.storage import key, past, payload, soon

MEBI = 2**20
Opening = Callable[[], HiCacheStorage]


def _memory(_folder: Path, _stack: ExitStack) -> Opening:
    return lambda: open_storage("memory", StorageConfig(capacity_bytes=64 * MEBI))


def _file(folder: Path, _stack: ExitStack) -> Opening:
    return lambda: open_storage("file", StorageConfig(path=str(folder / "pages"), capacity_bytes=64 * MEBI))


def _objects_in_memory(_folder: Path, _stack: ExitStack) -> Opening:
    return lambda: open_storage("obstore", StorageConfig(path="memory:///"))


def _objects_in_folder(folder: Path, _stack: ExitStack) -> Opening:
    return lambda: open_storage("obstore", StorageConfig(path=f"file://{folder}/objects"))


def _objects_of_service(_folder: Path, stack: ExitStack) -> Opening:
    service = stack.enter_context(object_service())
    return lambda: open_storage("obstore", StorageConfig(path="s3://bucket/kv", options=service.options()))


def _mooncake(folder: Path, stack: ExitStack) -> Opening:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    master, _ = stack.enter_context(mooncake_master(folder / "master.log"))
    return lambda: open_storage("mooncake", StorageConfig(path=master, capacity_bytes=64 * MEBI))


BACKENDS = {
    "memory": [_memory],
    "file": [_file],
    "obstore": [_objects_in_memory, _objects_in_folder, _objects_of_service],
    "mooncake": [_mooncake],
}
CASES = [
    pytest.param(case, id=case.__name__.strip("_"), marks=[pytest.mark.mooncake] if name == "mooncake" else [])
    for name, cases in BACKENDS.items()
    for case in cases
]


@pytest.fixture(params=CASES)
def opening(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opening]:
    """Opens a storage in one place, each time anew; what it opened is checked and closed after the test."""
    with ExitStack() as stack:
        open_again = request.param(tmp_path, stack)

        def opened() -> HiCacheStorage:
            storage = open_again()
            stack.callback(storage.close)
            stack.callback(storage.check_integrity)
            return storage

        yield opened


@pytest.fixture
def storage(opening: Opening) -> HiCacheStorage:
    return opening()


def test_every_backend_that_is_built_in_is_tried_here() -> None:
    assert BACKENDS.keys() == BUILTIN_BACKENDS.keys()


def test_what_was_set_is_got_in_the_order_of_the_keys(storage: HiCacheStorage) -> None:
    values = [(key(number), (payload(number, 100 + number),)) for number in range(5)]

    stored = storage.set(values, soon())
    got = storage.get([key(3), key(9), key(0)], soon())

    assert stored == [Outcome.STORED] * 5
    assert [each.outcome for each in got] == [Outcome.HIT, Outcome.ABSENT, Outcome.HIT]
    assert bytes(got[0].value or b"") == payload(3, 103)
    assert got[1].value is None
    assert bytes(got[2].value or b"") == payload(0, 100)


def test_parts_become_one_value(storage: HiCacheStorage) -> None:
    parts = (b"head", memoryview(bytearray(payload(1, 3 * MEBI))), bytearray(b"tail"))

    storage.set([(key(1), parts)], soon())

    (got,) = storage.get([key(1)], soon())
    assert bytes(got.value or b"") == b"head" + payload(1, 3 * MEBI) + b"tail"


def test_nothing_reads_the_parts_after_set(storage: HiCacheStorage) -> None:
    part = bytearray(payload(1))

    storage.set([(key(1), (part,))], soon())
    part[:] = bytes(len(part))

    (got,) = storage.get([key(1)], soon())
    assert bytes(got.value or b"") == payload(1)


def test_a_new_value_takes_the_place_of_an_old_one(storage: HiCacheStorage) -> None:
    storage.set([(key(1), (b"old, and longer",)), (key(2), (b"other",))], soon())

    assert storage.set([(key(1), (b"new",))], soon()) == [Outcome.STORED]

    assert [bytes(got.value or b"") for got in storage.get([key(1), key(2)], soon())] == [b"new", b"other"]


def test_exists_tells_what_get_would_find(storage: HiCacheStorage) -> None:
    storage.set([(key(1), (b"one",))], soon())

    assert storage.exists([key(2), key(1)], soon()) == [Outcome.ABSENT, Outcome.HIT]


def test_deleted_is_absent(storage: HiCacheStorage) -> None:
    storage.set([(key(1), (b"one",)), (key(2), (b"two",))], soon())
    storage.get([key(1)], soon())

    assert storage.delete([key(1), key(3)], soon()) == [Outcome.DELETED, Outcome.ABSENT]

    assert [got.outcome for got in storage.get([key(1), key(2)], soon())] == [Outcome.ABSENT, Outcome.HIT]


def test_clear_removes_everything_and_leaves_the_storage_usable(storage: HiCacheStorage) -> None:
    storage.set([(key(number), (b"value",)) for number in range(7)], soon())

    assert storage.clear(soon()) == 7

    assert storage.exists([key(number) for number in range(7)], soon()) == [Outcome.ABSENT] * 7
    assert storage.clear(soon()) == 0
    assert storage.set([(key(1), (b"again",))], soon()) == [Outcome.STORED]


def test_past_the_deadline_nothing_is_done(storage: HiCacheStorage) -> None:
    storage.set([(key(1), (b"one",))], soon())

    assert [got.outcome for got in storage.get([key(1)], past())] == [Outcome.LATE]
    assert storage.exists([key(1)], past()) == [Outcome.LATE]
    assert storage.set([(key(2), (b"two",))], past()) == [Outcome.LATE]
    assert storage.delete([key(1)], past()) == [Outcome.LATE]

    assert storage.exists([key(1), key(2)], soon()) == [Outcome.HIT, Outcome.ABSENT]


def test_no_keys_no_results(storage: HiCacheStorage) -> None:
    assert (storage.get([], soon()), storage.set([], soon())) == ([], [])
    assert (storage.exists([], soon()), storage.delete([], soon())) == ([], [])


def test_threads_do_not_disturb_one_another(storage: HiCacheStorage) -> None:
    wrong: list[str] = []

    def work(number: int) -> None:
        mine = [number * 10 + each for each in range(8)]
        for _ in range(3):
            storage.set([(key(each), (payload(each),)) for each in mine], soon())
            for each, got in zip(mine, storage.get([key(each) for each in mine], soon()), strict=True):
                if bytes(got.value or b"") != payload(each):
                    wrong.append(f"{each}: {got.outcome}")
            storage.delete([key(each) for each in mine[:4]], soon())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    kept = [key(number * 10 + each) for number in range(4) for each in range(4, 8)]
    assert storage.exists(kept, soon()) == [Outcome.HIT] * 16


def test_what_is_shared_is_seen_by_another_that_is_open(opening: Opening) -> None:
    one, other = opening(), opening()

    one.set([(key(1), (b"shared?",))], soon())

    (got,) = other.get([key(1)], soon())
    assert (got.outcome is Outcome.HIT) == one.capabilities.shared
    other.delete([key(1)], soon())
    assert (one.exists([key(1)], soon()) == [Outcome.ABSENT]) == one.capabilities.shared


def test_what_is_persistent_outlives_its_storage(opening: Opening) -> None:
    first = opening()
    first.set([(key(1), (payload(1),))], soon())
    first.check_integrity()
    first.close()

    (got,) = opening().get([key(1)], soon())

    assert (got.outcome is Outcome.HIT) == first.capabilities.persistent


def test_usage_where_it_is_known_is_what_was_set(storage: HiCacheStorage) -> None:
    storage.set([(key(1), (b"12345",)), (key(2), (b"123",)), (key(1), (b"1",))], soon())

    assert storage.usage() in (None, (4, 2))


def test_closing_twice_is_closing_once(opening: Opening) -> None:
    storage = opening()
    storage.close()
    storage.close()
