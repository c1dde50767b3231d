"""Tiers that go wrong below a whole engine: what fails is a miss, every answer is its cold twin's, and it serves on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from app.core.keys import Namespace
from app.hicache.storage.base import HiCacheStorage, PageKey
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
from app.providers.testing import failing_runner
from app.tpu.failing_runner import InjectedFailure
from tests.support.storage import IDENTITY
from tests.support.tiered_engine import (
    MODELS,
    FatedCopies,
    file_fields,
    storage_fields,
    tier_fields,
    tiered_site,
    with_copies,
    with_storage,
)

STEM = np.random.default_rng(12).integers(0, 256, 400).astype(np.int32).tolist()
PROMPT = STEM[:41]  # 40 tokens may be cached
OTHER = STEM[100:141]
EVERY_MODEL = pytest.mark.parametrize(
    "model", [model if model == "all" else pytest.param(model, marks=pytest.mark.slow) for model in MODELS]
)
TWO_MODELS = pytest.mark.parametrize("model", ["full", pytest.param("all", marks=pytest.mark.slow)])

# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("polls", [1, 3, 20])
@TWO_MODELS
def test_copies_that_come_late_are_waited_for_and_right(model: str, polls: int) -> None:
    copies = FatedCopies()
    copies.polls_late = polls
    with tiered_site(model, **tier_fields(), overrides=with_copies(copies)) as site:
        site.ask(PROMPT)
        site.leave_device()
        assert site.ask(PROMPT).host == 40
        assert site.ask(PROMPT).device == 40


@pytest.mark.parametrize("fate", ["is_never", "is_failing"])
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@TWO_MODELS
def test_a_backup_that_fails_is_just_not_there(model: str, policy: str, fate: str) -> None:
    """Peers' fault 3: it is handled once and raised nowhere; the next one is tried again."""
    copies = FatedCopies()
    fields = tier_fields(hicache_write_policy=policy, hicache_copy_deadline=0.05)
    with tiered_site(model, **fields, overrides=with_copies(copies)) as site:
        setattr(copies, fate, True)
        site.ask(PROMPT)
        site.leave_device()
        reason = {"is_never": "late", "is_failing": "failed"}[fate]
        assert site.counters().backup_drops[reason] > 0
        assert site.counters().num_host_pages_free == site.counters().num_host_pages
        assert site.ask(PROMPT).output.cached_tokens == 0

        setattr(copies, fate, False)
        site.leave_device()
        site.ask(PROMPT)
        site.leave_device()
        assert site.ask(PROMPT).host == 40


@pytest.mark.parametrize("fate", ["is_never", "is_failing"])
@TWO_MODELS
def test_a_restore_that_fails_is_computed_and_what_the_host_has_stays(model: str, fate: str) -> None:
    copies = FatedCopies()
    fields = tier_fields(hicache_copy_deadline=0.05)
    with tiered_site(model, **fields, overrides=with_copies(copies)) as site:
        site.ask(PROMPT)
        site.leave_device()
        setattr(copies, fate, True)
        assert site.ask(PROMPT).output.cached_tokens == 0
        assert sum(site.counters().restore_failures.values()) > 0

        setattr(copies, fate, False)
        site.leave_device()
        assert site.ask(PROMPT).host == 40


def test_a_burst_of_backups_takes_no_more_than_its_staging() -> None:
    """H23: the queue is capped, what waits may be evicted, and shutting down with all of it pending loses no lock."""
    copies = FatedCopies()
    copies.polls_late = 50
    fields = tier_fields(hicache_staging_size=1e-6, context_length=400, max_total_tokens=800)
    with tiered_site(**fields, overrides=with_copies(copies)) as site:
        mover, limits = site.engine.container.tier_mover(), site.engine.container.host_size().limits
        for index in range(5):
            site.engine.add([index, *STEM[:150]], max_tokens=1)
        pending = 0
        while site.engine.scheduler.has_work():
            site.step()
            counters = site.counters()
            pending = max(pending, counters.queue_length + counters.backups_in_flight)
            assert mover.counters().most_staging_bytes <= limits.staging_bytes
            assert counters.bytes_in_flight <= limits.staging_bytes
        assert pending > 1
        assert site.is_busy
        site.engine.adapter.make_room(site.engine.adapter.reachable())
        site.step(3)
        copies.polls_late = 10**6
        site.engine.add(OTHER, max_tokens=1)
        site.step(4)
        assert site.is_busy
        site.engine.runtime.close()
        site.engine.runtime.open()
        copies.polls_late = 0
        assert site.ask(OTHER).output.cached_tokens == 0
        site.leave_device()
        assert site.ask(OTHER).host == 40


# -- pools that are full ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one at a time"])
@EVERY_MODEL
def test_both_pools_full_of_what_the_other_wants(model: str, overlap: bool) -> None:
    """H10: restoring takes device room, whose making takes host room, which may not take what is being restored.

    Peers' fault 1 too: few device pages are free, and everything else there is evictable.
    """
    # Window pages and snapshots are fewer than pages: the host has room for all that one prompt needs.
    ratio = 0.5 if model == "full" else 1.5
    fields = tier_fields(hicache_write_policy="write_back", hicache_ratio=ratio, disable_overlap=not overlap)
    with tiered_site(model, **{**fields, "context_length": 80, "max_total_tokens": 160}) as site:
        num_whole = 0
        for round_ in range(3):
            site.ask(PROMPT)
            site.leave_device()  # the prompt is on the host only
            for index in range(3):  # and others, that the host has not, on the device
                site.ask([round_, index, *STEM[60 * index + 60 : 60 * index + 98]], max_tokens=4)
            site.ask([round_, 9, *STEM[300:311]], max_tokens=1)
            assert model != "full" or site.engine.adapter.page_counts().free < 10

            hits = site.ask(PROMPT)

            assert hits.device == 0
            num_whole += hits.host == 40
            assert site.ask(PROMPT).device == 40
        assert num_whole == 3 if model == "full" else num_whole > 0


@TWO_MODELS
def test_rows_that_give_way_while_restores_come_late(model: str) -> None:
    copies = FatedCopies()
    fields = tier_fields(max_total_tokens=128, chunked_prefill_size=8)
    with tiered_site(model, **fields, overrides=with_copies(copies)) as site:
        for prompt in (PROMPT, OTHER):
            site.ask(prompt)
        site.leave_device()
        for polls in range(0, 12, 3):
            copies.polls_late = polls
            for index in range(3):
                site.engine.add([*STEM[200 + index : 215 + index]], max_tokens=30)
            site.step(polls + 1)
            for prompt in (PROMPT, OTHER):
                site.engine.add([*prompt, polls], max_tokens=20)
            site.finish()
        assert site.engine.scheduler.num_retractions > 0
        assert site.counters().restored_tokens > 0


# -- storage ----------------------------------------------------------------------------------------------------------


def another_model(value: bytes) -> bytes:
    return of_another_model(IDENTITY, PageKey(bytes(32)))(value)


BROKEN: dict[str, Callable[[HiCacheStorage], HiCacheStorage]] = {
    "errors": lambda inner: FailingStorage(inner, num_failures=10**6),
    "raises": RaisingStorage,
    "bit rot": lambda inner: CorruptStorage(inner, flipped_bit),
    "cut": lambda inner: CorruptStorage(inner, cut),
    "longer": lambda inner: CorruptStorage(inner, lengthened),
    "another model's": lambda inner: CorruptStorage(inner, another_model),
}


@pytest.mark.parametrize("fault", BROKEN)
@TWO_MODELS
def test_what_a_broken_storage_has_is_computed(model: str, fault: str) -> None:
    sound = MemoryStorage(10**7)
    with tiered_site(model, **storage_fields(), overrides=with_storage(sound)) as site:
        site.ask(PROMPT)
    assert sound.usage().num_values > 0
    with tiered_site(model, **storage_fields(), overrides=with_storage(BROKEN[fault](sound))) as site:
        assert site.ask(PROMPT).output.cached_tokens == 0
        assert sum(site.counters().storage.fetches_dropped.values()) > 0
        assert site.ask(PROMPT).device == 40
        site.leave_device()
        assert site.ask(PROMPT).host == 40
    with tiered_site(model, **storage_fields(), overrides=with_storage(sound)) as site:
        assert site.ask(PROMPT).storage == 40


@TWO_MODELS
def test_a_full_storage_keeps_nothing_and_stops_nobody(model: str) -> None:
    storage = FullStorage(MemoryStorage(10**7))
    for _ in range(2):
        with tiered_site(model, **storage_fields(), overrides=with_storage(storage)) as site:
            assert site.ask(PROMPT).storage == 0
            assert site.ask(PROMPT).device == 40
            assert sum(site.counters().storage.stores_dropped.values()) > 0


@TWO_MODELS
def test_a_slow_storage_is_waited_for_as_the_policy_says(model: str) -> None:
    sound = MemoryStorage(10**7)
    with tiered_site(model, **storage_fields(), overrides=with_storage(sound)) as site:
        site.ask(PROMPT)
    slow = with_storage(SlowStorage(sound, seconds=0.02))
    with tiered_site(model, **storage_fields(), overrides=slow) as site:
        assert site.ask(PROMPT).storage == 40
    eager = storage_fields(hicache_storage_prefetch_policy="best_effort")
    with tiered_site(model, **eager, overrides=slow) as site:
        site.ask(PROMPT)
        assert site.ask(PROMPT).device == 40


def test_a_storage_that_never_answers_holds_nobody_back_for_ever() -> None:
    silent = SilentStorage(MemoryStorage(10**7))
    fields = storage_fields(hicache_storage_deadline=0.1)
    try:
        with tiered_site(**fields, overrides=with_storage(silent)) as site:
            site.engine.add(PROMPT, max_tokens=4)
            site.engine.drain(max_steps=2000)
            assert site.engine.outputs["r0"].cached_tokens == 0
            silent.release()
            site.finish()
    finally:
        silent.release()


def test_a_queue_too_short_for_a_prefix_brings_it_in_pieces() -> None:
    """What the storage's workers could not queue at once is asked for again, behind what came."""
    sound = MemoryStorage(10**7)
    prompt = STEM[:101]
    with tiered_site(**storage_fields(), overrides=with_storage(sound)) as site:
        site.ask(prompt)
    fields = storage_fields(hicache_ratio=2.0)  # of 64 pages: a queue of an eighth of them, and 25 are asked for
    with tiered_site(**fields, overrides=with_storage(sound)) as site:
        hits = site.ask(prompt)
        assert hits.storage == 100
        assert site.counters().storage.fetches_dropped == {}


# -- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "one at a time"])
@TWO_MODELS
def test_an_abort_at_any_point_of_a_restore_or_fetch(model: str, overlap: bool) -> None:
    copies, storage = FatedCopies(), MemoryStorage(10**7)
    copies.polls_late = 3
    overrides = {**with_copies(copies), **with_storage(storage)}
    with tiered_site(model, **storage_fields(disable_overlap=not overlap), overrides=overrides) as site:
        site.ask(PROMPT)
        for leave_host in (False, True):
            for steps in range(10):
                site.leave_device()
                if leave_host:
                    site.leave_host()
                doomed = site.engine.add([*PROMPT[:-1], 200 + steps], max_tokens=6)
                site.step(steps)
                site.engine.scheduler.abort(doomed)
                site.finish()
            site.leave_device()
            if leave_host:
                site.leave_host()
            hits = site.ask(PROMPT)
            assert hits.device == 0
            assert (hits.host, hits.storage) == ((0, 40) if leave_host else (40, 0))


# -- the device -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_dispatch", [True, False], ids=["at dispatch", "while it runs"])
@EVERY_MODEL
def test_the_host_outlives_a_device_that_fails_with_transfers_under_way(model: str, at_dispatch: bool) -> None:
    num_hosted = 0
    for step in range(6, 26, 3):
        copies = FatedCopies()
        copies.polls_late = 2
        failure = InjectedFailure(step=step, at_dispatch=at_dispatch)
        runner = {"model_runner": failing_runner(failure)}
        with tiered_site(model, **tier_fields(), overrides={**runner, **with_copies(copies)}) as site:
            site.ask(PROMPT)
            site.engine.add(OTHER, max_tokens=8)
            site.step(2)
            site.engine.add([*PROMPT, 1], max_tokens=8)
            site.engine.add(STEM[200:230], max_tokens=8)
            site.finish()
            while not any(output.finish_reason == "error" for output in site.engine.outputs.values()):
                site.engine.add(STEM[300 : 310 + len(site.engine.requests)], max_tokens=4)
                site.finish()
            hits = site.ask(PROMPT)
            num_hosted += hits.host > 0
            assert site.ask(PROMPT).output.finish_reason == "length"
    assert num_hosted > 0


# -- whose prefix it is -----------------------------------------------------------------------------------------------

NAMESPACES = [
    Namespace(),
    Namespace(salt=""),
    Namespace(salt="x"),
    Namespace(adapter="x"),
    Namespace(extra_key="x"),
    Namespace(salt="x", extra_key="y"),
    Namespace(salt="xy"),
    Namespace(extra_key="xy"),
    Namespace(salt="\u0445"),  # looks like x
    Namespace(salt="1"),
    Namespace(dp_rank=1),
]


def test_equal_tokens_of_others_are_found_in_no_tier() -> None:
    """H12: only who gives the same tuple gets a prefix, from the host and from storage as well."""
    with tiered_site(**tier_fields(max_total_tokens=1024)) as site:
        for namespace in NAMESPACES:
            assert site.ask(PROMPT, namespace=namespace).output.cached_tokens == 0
        site.leave_device()
        for namespace in NAMESPACES:
            assert site.ask(PROMPT, namespace=namespace).host == 40
    storage = MemoryStorage(10**7)
    for namespace in NAMESPACES:  # a server for each, that finds in the storage what all before it left
        with tiered_site(**storage_fields(), overrides=with_storage(storage)) as site:
            assert site.ask(PROMPT, namespace=namespace).output.cached_tokens == 0
    with tiered_site(**storage_fields(max_total_tokens=1024), overrides=with_storage(storage)) as site:
        for namespace in NAMESPACES:
            assert site.ask(PROMPT, namespace=namespace).storage == 40


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*/*.kv")}


def test_salts_part_the_files_of_equal_tokens(tmp_path: Path) -> None:
    """H13: no file of one salt is another's; those of no salt have the same names at every start."""
    given = {"none": None, "one": "1", "two": "2"}
    for name, salt in given.items():
        with tiered_site(**file_fields(tmp_path / name)) as site:
            site.ask(PROMPT, namespace=Namespace(salt=salt))
    with tiered_site(**file_fields(tmp_path / "none again")) as site:
        site.ask(PROMPT)
    found = {name: names(tmp_path / name) for name in (*given, "none again")}
    assert all(len(files) == 11 for files in found.values())  # the answer's first three tokens too
    assert found["none"] == found["none again"]
    assert not found["none"] & found["one"]
    assert not (found["none"] | found["one"]) & found["two"]

    for salt, storage in (("2", 0), (None, 0), ("1", 40)):
        with tiered_site(**file_fields(tmp_path / "one")) as site:
            assert site.ask(PROMPT, namespace=Namespace(salt=salt)).storage == storage


# -- chains -----------------------------------------------------------------------------------------------------------


@EVERY_MODEL
def test_late_data_whose_parents_are_gone_is_let_go(model: str) -> None:
    """H26: a prefetch is under way, and meanwhile its anchor is split, evicted, taken away; its data ends as a miss."""
    sound = MemoryStorage(10**7)
    with tiered_site(model, **storage_fields(), overrides=with_storage(sound)) as site:
        site.ask(PROMPT)
    for what in ("split", "evict", "host", "all"):
        late = LateStorage(sound, num_calls=2)
        fields = storage_fields(hicache_storage_prefetch_policy="best_effort")
        try:
            with tiered_site(model, **fields, overrides=with_storage(late)) as site:
                site.engine.add([*PROMPT[:17]], max_tokens=1)
                site.step(6)
                site.engine.add(PROMPT, max_tokens=3)
                site.step(2)
                if what in ("split", "all"):
                    site.engine.add([*PROMPT[:9], 3, 3, 3], max_tokens=2)
                    site.step(3)
                if what in ("evict", "all"):
                    site.engine.adapter.make_room(site.engine.adapter.reachable())
                    site.step(1)
                if what in ("host", "all"):
                    site.tiers.host.flush()
                    site.step(1)
                late.release()
                site.finish()
                site.leave_device()
                assert site.ask(PROMPT).output.cached_tokens in (0, 16, 40)
                site.engine.scheduler.flush_cache()
                site.finish()
                assert site.counters().num_host_pages_free == site.counters().num_host_pages
        finally:
            late.release()


@EVERY_MODEL
def test_a_backup_without_room_means_dropped_and_never_a_hole(model: str) -> None:
    """H26: whatever is refused, the host's prefixes are whole from their beginning, and every hit is right."""
    fields = tier_fields(hicache_write_policy="write_back", hicache_ratio=1e-6, max_total_tokens=160)
    with tiered_site(model, **{**fields, "context_length": 100}) as site:
        rng = np.random.default_rng(3)
        for _ in range(12):
            start = int(rng.integers(0, 3)) * 100
            site.ask([*STEM[start : start + int(rng.integers(10, 80))], int(rng.integers(256))], max_tokens=4)
        site.leave_device()
        assert sum(site.counters().backup_drops.values()) > 0


def test_the_files_never_outgrow_their_quota(tmp_path: Path) -> None:
    """H28: what is counted is what is there, after each request and after a restart."""
    quota = 4000
    fields = file_fields(tmp_path, hicache_storage_size=quota / 1e9)
    rng = np.random.default_rng(9)
    num_files = set()
    for _ in range(2):
        with tiered_site(**fields) as site:
            for _ in range(8):
                start = int(rng.integers(0, 300))
                site.ask(STEM[start : start + 45], max_tokens=2)
                storage = site.engine.container.storage().storage
                storage.check_integrity()
                on_disk = sum(path.stat().st_size for path in tmp_path.glob("*/*.kv"))
                assert storage.usage().num_bytes == on_disk <= quota
                num_files.add(len(names(tmp_path)))
    assert max(num_files) > 5


def test_the_doubles_are_doubles_of_a_whole_storage() -> None:
    """Every fault above is one of a storage that would otherwise have had the prefix."""
    sound = MemoryStorage(10**7)
    with tiered_site(**storage_fields(), overrides=with_storage(StorageDouble(sound))) as site:
        site.ask(PROMPT)
    with tiered_site(**storage_fields(), overrides=with_storage(StorageDouble(sound))) as site:
        assert site.ask(PROMPT).storage == 40
