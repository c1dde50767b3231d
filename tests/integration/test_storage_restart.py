"""Pages stored by one process and read by the next, through keys, codec, workers and files."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.core.keys import DEFAULT_NAMESPACE, Namespace, RadixKey, StorageIdentity, page_hashes
from app.hicache.storage.base import Outcome, PageKey
from app.hicache.storage.chunks import Arrival
from app.hicache.storage.file_layout import entries
from app.hicache.storage.registry import StorageConfig, open_storage
from app.hicache.storage.value import ValueCodec
from app.hicache.storage.workers import StorageWorkers
from tests.support.storage import IDENTITY, PAYLOAD_BYTES, payload, soon

TOKENS = RadixKey.of(np.arange(64, dtype=np.int32))
SALTED = Namespace(salt="1")


class Server:
    """As much of one as stores pages."""

    def __init__(self, folder: Path, identity: StorageIdentity = IDENTITY) -> None:
        storage = open_storage("file", StorageConfig(path=str(folder), capacity_bytes=2**20))
        self.workers = StorageWorkers(storage)
        self.codec = ValueCodec(identity, PAYLOAD_BYTES)
        self.identity = identity
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()

    def keys(self, namespace: Namespace) -> list[PageKey]:
        hashes = page_hashes(self.identity.seed(namespace), TOKENS.raw, self.identity.page_size)
        return [PageKey(each) for each in hashes]

    def store(self, namespace: Namespace, pages: Sequence[bytes]) -> None:
        self.workers.set(self.codec, self.keys(namespace), pages, self.arrivals.put, soon())
        assert [each.outcome for each in self.arrivals.get(timeout=60).results] == [Outcome.STORED] * 4

    def load(self, namespace: Namespace) -> list[bytes | Outcome]:
        self.workers.get(self.codec, self.keys(namespace), self.arrivals.put, soon())
        results = self.arrivals.get(timeout=60).results
        return [each.outcome if each.value is None else bytes(each.value) for each in results]

    def stop(self) -> None:
        assert self.workers.close(60).running == 0
        self.workers.check_integrity()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


def test_a_server_that_starts_again_has_its_pages(folder: Path) -> None:
    pages = [payload(number) for number in range(4)]
    first = Server(folder)
    first.store(DEFAULT_NAMESPACE, pages)
    first.stop()

    again, second = Server(folder), Server(folder)

    assert again.load(DEFAULT_NAMESPACE) == second.load(DEFAULT_NAMESPACE) == pages
    again.stop()
    second.stop()


def test_equal_tokens_under_other_salts_are_other_files(folder: Path) -> None:
    first = Server(folder)
    first.store(SALTED, [payload(number) for number in range(4)])
    first.stop()

    again = Server(folder)

    for namespace in (DEFAULT_NAMESPACE, Namespace(salt="2"), Namespace(adapter="1"), Namespace(extra_key="1")):
        assert again.load(namespace) == [Outcome.ABSENT] * 4
    assert again.load(SALTED) == [payload(number) for number in range(4)]
    again.store(DEFAULT_NAMESPACE, [payload(10 + number) for number in range(4)])
    assert again.load(SALTED) == [payload(number) for number in range(4)]
    assert len({entry.path.name for entry in entries(folder)}) == 8
    again.stop()


@pytest.mark.parametrize("field", ["model", "weights", "dtype", "layout"])
def test_another_model_finds_nothing(folder: Path, field: str) -> None:
    first = Server(folder)
    first.store(DEFAULT_NAMESPACE, [payload(number) for number in range(4)])
    first.stop()

    other = Server(folder, replace(IDENTITY, **{field: "other"}))

    assert other.load(DEFAULT_NAMESPACE) == [Outcome.ABSENT] * 4
    other.stop()


def test_another_models_value_under_our_key_is_refused(folder: Path) -> None:
    """Which no key of ours leads to; a file may have been copied by hand."""
    first = Server(folder)
    first.store(DEFAULT_NAMESPACE, [payload(number) for number in range(4)])
    first.stop()
    other = Server(folder, replace(IDENTITY, weights="other"))
    other.store(DEFAULT_NAMESPACE, [payload(number) for number in range(10, 14)])
    other.stop()
    paths = {entry.key: entry.path for entry in entries(folder)}
    for ours, theirs in zip(first.keys(DEFAULT_NAMESPACE), other.keys(DEFAULT_NAMESPACE), strict=True):
        paths[ours].write_bytes(paths[theirs].read_bytes())

    again = Server(folder)

    assert again.load(DEFAULT_NAMESPACE) == [Outcome.FOREIGN] * 4
    assert again.load(DEFAULT_NAMESPACE) == [Outcome.ABSENT] * 4
    again.stop()
