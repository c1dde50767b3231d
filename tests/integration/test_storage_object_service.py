"""An object service that goes wrong, over HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from app.hicache.storage.base import HiCacheStorage, Outcome
from app.hicache.storage.file_layout import value_name
from app.hicache.storage.registry import StorageConfig, open_storage
from tests.support.object_service import ObjectService, object_service
from tests.support.storage import key, soon


@pytest.fixture
def service() -> Iterator[ObjectService]:
    with object_service() as running:
        yield running


@pytest.fixture
def storage(service: ObjectService) -> Iterator[HiCacheStorage]:
    opened = open_storage("obstore", StorageConfig(path="s3://bucket/kv", options=service.options()))
    yield opened
    opened.close()


def test_values_lie_under_the_prefix_by_their_keys(service: ObjectService, storage: HiCacheStorage) -> None:
    service.objects["kv/note"] = service.objects["other"] = b"not ours"

    storage.set([(key(1), (b"head", b"body"))], soon())

    assert service.objects.pop(f"kv/{value_name(key(1))}") == b"headbody"
    storage.set([(key(2), (b"value",))], soon())
    assert storage.clear(soon()) == 1
    assert service.objects == {"kv/note": b"not ours", "other": b"not ours"}


@pytest.mark.parametrize(
    ("status", "outcome"), [(500, Outcome.FAULT), (503, Outcome.FAULT), (403, Outcome.DENIED), (401, Outcome.DENIED)]
)
def test_a_service_that_fails_is_an_outcome(
    service: ObjectService, storage: HiCacheStorage, status: int, outcome: Outcome
) -> None:
    storage.set([(key(1), (b"value",))], soon())
    service.status = status

    assert [got.outcome for got in storage.get([key(1), key(2)], soon())] == [outcome] * 2
    assert storage.set([(key(1), (b"new",))], soon()) == [outcome]
    assert storage.exists([key(1)], soon()) == [outcome]
    assert storage.delete([key(1)], soon()) == [outcome]
    assert storage.clear(soon()) == 0

    service.status = None
    assert [got.outcome for got in storage.get([key(1)], soon())] == [Outcome.HIT]


def test_a_service_that_does_not_answer_is_late_and_the_next_call_is_served(
    service: ObjectService, storage: HiCacheStorage
) -> None:
    storage.set([(key(1), (b"value",))], soon())
    service.hold.clear()

    deadline = time.monotonic() + 0.1
    assert [got.outcome for got in storage.get([key(1), key(2)], deadline)] == [Outcome.LATE] * 2
    assert storage.set([(key(2), (b"value",))], time.monotonic() + 0.1) == [Outcome.LATE]
    service.hold.set()

    assert [got.outcome for got in storage.get([key(1)], soon())] == [Outcome.HIT]


def test_a_service_that_is_gone_is_a_fault(service: ObjectService, storage: HiCacheStorage) -> None:
    service.shutdown()
    service.server_close()

    assert [got.outcome for got in storage.get([key(1)], soon())] == [Outcome.FAULT]
    assert storage.set([(key(1), (b"value",))], soon()) == [Outcome.FAULT]
