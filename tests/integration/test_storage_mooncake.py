"""Mooncake Store with a real master and real clients: what only it can get wrong. The contract is tried elsewhere."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.hicache.storage.base import HiCacheStorage, Outcome
from app.hicache.storage.registry import StorageConfig, open_storage
from app.hicache.storage.workers import StorageWorkers, WorkerLimits
from tests.support.mooncake_master import mooncake_master, why_not
from tests.support.storage import codec, key, payload, soon

pytestmark = pytest.mark.mooncake

MEBI = 2**20


@pytest.fixture
def master(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with mooncake_master(tmp_path / "master.log") as running:
        yield running


def client(address: str, lent_bytes: int = 64 * MEBI) -> HiCacheStorage:
    return open_storage("mooncake", StorageConfig(path=address, capacity_bytes=lent_bytes))


def test_values_live_with_the_client_that_lends_their_memory(master: tuple[str, subprocess.Popen[bytes]]) -> None:
    address, _ = master
    one, other = client(address), client(address)
    keys = [key(number) for number in range(20)]

    one.set([(each, (payload(number),)) for number, each in enumerate(keys)], soon())
    assert [got.value for got in other.get(keys, soon())] == [payload(number) for number in range(20)]

    one.close()
    left = [got.outcome for got in other.get(keys, soon())]
    assert set(left) <= {Outcome.HIT, Outcome.ABSENT, Outcome.FAULT}
    assert other.set([(keys[0], (b"new",))], soon()) == [Outcome.STORED]
    other.close()


def test_more_than_fits_evicts_and_never_gives_wrong_bytes(master: tuple[str, subprocess.Popen[bytes]]) -> None:
    address, _ = master
    storage = client(address, 32 * MEBI)

    outcomes = storage.set([(key(number), (payload(number, 2 * MEBI),)) for number in range(40)], soon())
    found = storage.get([key(number) for number in range(40)], soon())

    assert set(outcomes) <= {Outcome.STORED, Outcome.FULL}
    hits = [number for number, got in enumerate(found) if got.outcome is Outcome.HIT]
    assert 0 < len(hits) < 40
    assert all(found[number].value == payload(number, 2 * MEBI) for number in hits)
    storage.close()


def test_without_its_master_every_key_is_a_fault(master: tuple[str, subprocess.Popen[bytes]]) -> None:
    address, process = master
    storage = client(address)
    storage.set([(key(1), (b"value",))], soon())
    process.kill()
    process.wait()

    assert storage.exists([key(1)], soon()) == [Outcome.FAULT]
    assert storage.set([(key(2), (b"value",))], soon()) == [Outcome.FAULT]
    assert [got.outcome for got in storage.get([key(2)], soon())] == [Outcome.FAULT]
    assert storage.delete([key(1)], soon()) == [Outcome.FAULT]
    assert storage.clear(soon()) == 0
    storage.close()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "", "127.0.0.1", "127.0.0.1:99999", "no such host:50051"])
def test_where_no_master_answers_the_storage_is_refused(address: str) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)

    with pytest.raises(ConfigError, match="HOST:PORT of a running mooncake_master"):
        client(address)


def test_workers_answer_in_time_while_the_client_waits_for_a_dead_master(
    master: tuple[str, subprocess.Popen[bytes]],
) -> None:
    address, process = master
    workers = StorageWorkers(client(address), WorkerLimits(max_attempts=1))
    process.kill()
    process.wait()
    answers: list[Outcome] = []

    workers.set(
        codec(),
        [key(1)],
        [payload(1)],
        lambda arrival: answers.extend(each.outcome for each in arrival.results),
        time.monotonic() + 0.2,
    )
    assert workers.wait_idle(60)

    assert answers in ([Outcome.LATE], [Outcome.FAULT])
    workers.close(60)
