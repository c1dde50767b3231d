"""A runtime that is closed and opened again: its storage is attached again, and control knows that it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dependency_injector import providers

from app.errors import ConfigError
from app.hicache.storage.base import HiCacheStorage
from app.hicache.storage.memory import MemoryStorage
from app.observability.kv_events import KvEventRecorder, KvEventReplica
from tests.support.tiered_engine import TieredSite, file_fields, storage_fields, tiered_site

PROMPT = [*range(50)]
HIT = 48


def reopen(site: TieredSite) -> None:
    site.engine.runtime.close()
    site.engine.runtime.open()


def storage_of(site: TieredSite) -> Any:
    return site.engine.container.storage().storage


def test_what_was_stored_is_found_by_the_runtime_that_comes_back(tmp_path: Path) -> None:
    recorder, replica = KvEventRecorder(page_size=4, medium="storage"), KvEventReplica("storage")
    events = {"storage_events": lambda _: providers.Object(recorder)}
    with tiered_site(**file_fields(tmp_path, overrides=events)) as site:
        # given
        site.ask(PROMPT)
        before = storage_of(site)
        replica.apply(recorder.drain())
        assert replica.page_hashes

        # when
        reopen(site)

        # then
        assert storage_of(site) is not before
        assert site.engine.container.storage_lane().is_attached
        hits = site.ask([*PROMPT, 1], max_tokens=1)
        assert (hits.device, hits.host, hits.storage) == (0, 0, HIT)
        replica.apply(recorder.drain())
        assert len(replica.page_hashes) == HIT // 4


def test_a_storage_that_came_back_empty_is_written_to_anew() -> None:
    """What control knew of the one before is forgotten with it."""
    opened: list[HiCacheStorage] = []

    def opening() -> HiCacheStorage:
        opened.append(MemoryStorage(10**7))
        return opened[-1]

    with tiered_site(**storage_fields(overrides={"storage_opener": lambda _: providers.Object(opening)})) as site:
        site.ask(PROMPT)

        reopen(site)
        site.ask(PROMPT)

        first, second = (storage.usage() for storage in opened)
        assert first is not None
        assert first == second
        assert first.num_values > 0


def test_a_storage_that_was_detached_stays_detached() -> None:
    with tiered_site(**storage_fields()) as site:
        site.tiers.detach_storage()
        site.engine.container.storage().close()

        reopen(site)

        assert storage_of(site) is None
        assert not site.engine.container.storage_lane().is_attached
        assert site.ask(PROMPT).storage == 0


@pytest.mark.parametrize("prompt", [PROMPT, [7] * 20])
def test_without_the_storage_the_runtime_serves_all_the_same(prompt: list[int]) -> None:
    answers = [MemoryStorage(10**7)]

    def opening() -> HiCacheStorage:
        if not answers:
            raise ConfigError(field="path", value="gone", allowed="a storage that answers")
        return answers.pop()

    with tiered_site(**storage_fields(overrides={"storage_opener": lambda _: providers.Object(opening)})) as site:
        site.ask(PROMPT)

        reopen(site)

        assert storage_of(site) is None
        hits = site.ask(prompt)
        assert (hits.storage, hits.output.finish_reason) == (0, "length")
