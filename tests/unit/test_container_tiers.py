"""The tiers as the container puts them together: built when wanted, swapped whole, opened and closed in order."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dependency_injector import providers
from pytest_mock import MockerFixture

from app.caches.tiers.ports import TierParts
from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.containers import Container, build_container
from app.core.keys import Namespace
from app.core.sampling import SamplingParams
from app.core.transfers import PageCounts
from app.errors import ConfigError, RuntimeClosedError
from app.hicache.host_tier import HostTier
from app.hicache.storage.memory import MemoryStorage
from app.memory.host_kv_pool import HostKVPool
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.providers.testing import overridden
from app.runtime.local import new_identity
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from app.tpu.cpu_fake import FakeModelRunner, fake_model_config
from tests.support.tiny_llama import files_of, tiny_llama

PLAIN: dict[str, Any] = {"page_size": 4, "max_total_tokens": 256, "max_running_requests": 4, "check_invariants": True}
TIERS: dict[str, Any] = {**PLAIN, "enable_hierarchical_cache": True, "hicache_write_policy": "write_through"}
STORAGE: dict[str, Any] = {**TIERS, "hicache_storage_backend": "memory"}
TIER_PROVIDERS = (
    *("page_carriers", "host_pool", "storage_ids", "storage_lane", "storage", "tier_mover", "host_tier"),
    "host_size",
)
FULL = fake_model_config()
MODELS = {
    "full": FULL,
    "window": fake_model_config(window=12),
    "recurrent": fake_model_config(recurrent=True),
    "both": fake_model_config(window=12, recurrent=True),
}


def answers(container: Container, rounds: int = 2) -> list[list[int]]:
    """Of prompts that together have more tokens than the KV pool, each asked for in every round."""
    scheduler = container.scheduler()
    told = []
    for turn in range(rounds):
        for first in range(1, 7):
            prompt = np.arange(first, 90 + first, dtype=np.int32)
            request = Request(
                request_id=f"{turn}-{first}",
                prompt_token_ids=prompt,
                sampling=SamplingParams(max_tokens=5, ignore_eos=True),
            )
            told.append(generate_all(scheduler, [request])[0].token_ids)
    scheduler.check_integrity()
    container.runtime().check_integrity()
    assert container.runtime().identity.generation == 1  # no step has failed
    return told


def exploding(text: str) -> Callable[[Container], providers.Provider[object]]:
    def explode() -> None:
        raise AssertionError(text)

    return lambda _: providers.Factory(explode)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", [TIERS, STORAGE])
def test_every_provider_is_built_with_tiers_and_serves(settings: dict[str, Any], model: str) -> None:
    with overridden(ServerArgs(**PLAIN), fake=True, model=MODELS[model]) as container:
        expected = answers(container)
    with overridden(ServerArgs(**settings), fake=True, model=MODELS[model]) as container:
        built = {name: container.providers[name]() for name in container.providers if name != "checkpoint"}
        assert all(built[name] is not None for name in TIER_PROVIDERS)
        assert isinstance(built["host_pool"], HostKVPool)
        assert isinstance(built["tier_mover"], HostTier)
        assert built["storage_lane"].is_attached == ("hicache_storage_backend" in settings)
        kinds = [allocator is not None for allocator in built["host_pool"].allocators]
        assert kinds == [True, model in ("window", "both"), model in ("recurrent", "both")]
        assert answers(container) == expected


def test_a_real_model_answers_the_same_with_tiers() -> None:
    files = files_of(tiny_llama())
    with overridden(ServerArgs(**PLAIN), **files) as container:
        expected = answers(container)
    with overridden(ServerArgs(**STORAGE), **files) as container:
        assert answers(container) == expected
        assert container.host_pool().num_bytes > 0
        assert container.storage().storage.usage().num_values > 0


def test_without_the_flag_nothing_of_them_is_built() -> None:
    forbidden = {name: exploding(name) for name in ("page_carriers", "storage_ids", "host_tier")}
    with overridden(ServerArgs(**PLAIN), fake=True, **forbidden) as container:
        assert container.cache_deps().host_tier is None
        assert container.host_pool() is None
        assert container.tier_mover() is None
        assert container.storage_lane() is None
        answers(container, rounds=1)
        assert container.storage().storage is None


def test_only_the_cache_that_has_tiers_asks_for_their_parts() -> None:
    with overridden(ServerArgs(**TIERS), fake=True, host_tier=exploding("the parts")) as container:
        deps = container.cache_deps()
        assert deps.host_tier is not None
        with pytest.raises(AssertionError, match="the parts"):
            container.tree_cache()


def test_every_other_cache_refuses_tiers() -> None:
    with overridden(ServerArgs(**TIERS), fake=True) as container:
        for name, arm in container.tree_cache.providers.items():
            if name == "unified_radix_cache":
                arm().check_integrity()
                continue
            with pytest.raises(ConfigError, match="--enable-hierarchical-cache"):
                arm()


def test_building_the_cache_opens_no_storage_and_loads_no_weights() -> None:
    parts = {"model_runner": exploding("weights"), "storage_opener": exploding("storage")}
    with overridden(ServerArgs(**STORAGE), fake=True, model_runner=parts["model_runner"]) as container:
        container.tree_cache().check_integrity()
        assert container.storage().storage is None


def test_parts_that_are_swapped_reach_the_cache() -> None:
    def small(container: Container) -> providers.Provider[object]:
        return providers.ThreadSafeSingleton(_small_parts, container.host_size)

    with overridden(ServerArgs(**TIERS), fake=True, host_tier=small) as container:
        container.tree_cache().check_integrity()
        assert container.host_tier().token_allocator.capacity == 7
        assert container.host_pool().allocators.pages.capacity == 128


def _small_parts(size: Any) -> TierParts:
    return TierParts(token_allocator=PagedTokenToKVPoolAllocator(7, 4, new_identity()).port, limits=size.limits)


def test_cache_and_runtime_share_the_host_pool() -> None:
    with overridden(ServerArgs(**STORAGE), fake=True) as container:
        parts, pool = container.host_tier(), container.host_pool()
        assert parts.token_allocator is pool.allocators.pages.port
        assert parts.limits is container.host_size().limits
        assert parts.storage_seed(Namespace(salt="a")) != parts.storage_seed(Namespace(salt="b"))
        assert container.host_size().counts == PageCounts(128)
    with overridden(ServerArgs(**TIERS), fake=True) as container:
        assert container.host_tier().storage_seed is None


def test_settings_reach_their_places() -> None:
    args = ServerArgs(
        **STORAGE,
        hicache_copy_deadline=3.0,
        hicache_host_mode="buffer_only",
        hicache_storage_prefetch_timeout=0.5,
        hicache_storage_deadline=4.0,
    )
    with overridden(args, fake=True) as container:
        parts = container.host_tier()
    assert parts.limits.copy_deadline_s == 3.0
    settings = parts.settings
    assert (settings.write_policy, settings.write_min_hits, settings.host_mode) == ("write_through", 2, "buffer_only")
    assert (settings.prefetch_policy, settings.prefetch_timeout_s, settings.storage_deadline_s) == ("timeout", 0.5, 4.0)


# -- opening and closing ---------------------------------------------------------------------------------------------


class Diary:
    """What was opened and closed, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def runner(self, fails: bool = False) -> Callable[[Container], providers.Provider[object]]:
        diary = self

        class Runner(FakeModelRunner):
            def load(self) -> None:
                diary.entries.append("weights loaded")
                if fails:
                    raise OSError("unreadable")
                super().load()

            def close(self) -> None:
                diary.entries.append("weights dropped")
                super().close()

        return lambda _: providers.ThreadSafeSingleton(Runner, FULL.vocab_size)

    def opener(self) -> Callable[[Container], providers.Provider[object]]:
        diary = self

        class Storage(MemoryStorage):
            def close(self) -> None:
                diary.entries.append("storage closed")
                super().close()

        def opening() -> MemoryStorage:
            diary.entries.append("storage opened")
            return Storage(10**6)

        return lambda _: providers.Object(opening)


def test_storage_is_opened_before_the_weights_and_closed_after_the_runtime() -> None:
    diary = Diary()
    args = ServerArgs(**STORAGE)
    with overridden(args, fake=True, model_runner=diary.runner(), storage_opener=diary.opener()) as container:
        answers(container, rounds=1)
        container.shutdown_resources()
        container.shutdown_resources()
        with pytest.raises(RuntimeClosedError):
            container.runtime()
    assert sorted(diary.entries[2:]) == ["storage closed", "weights dropped"]
    assert diary.entries[:2] == ["storage opened", "weights loaded"]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("storage-")]


def test_a_storage_that_does_not_answer_is_refused_by_its_flag_before_weights_are_loaded(tmp_path) -> None:
    diary = Diary()
    a_file = tmp_path / "file"
    a_file.write_text("")
    args = ServerArgs(**{**STORAGE, "hicache_storage_backend": "file", "hicache_storage_path": str(a_file)})
    with overridden(args, fake=True, model_runner=diary.runner()) as container:
        with pytest.raises(ConfigError, match=r"^--hicache-storage-path="):
            container.runtime()
    assert diary.entries == []


def test_when_the_weights_cannot_be_loaded_the_storage_is_closed_and_may_be_opened_again() -> None:
    diary = Diary()
    parts = {"model_runner": diary.runner(fails=True), "storage_opener": diary.opener()}
    with overridden(ServerArgs(**STORAGE), fake=True, **parts) as container:
        for _ in range(2):
            with pytest.raises(OSError, match="unreadable"):
                container.runtime()
    assert diary.entries == ["storage opened", "weights loaded", "storage closed"] * 2


def test_sixteen_threads_get_one_of_each_and_open_one_storage() -> None:
    diary = Diary()
    slow = {"storage_opener": _slowly(diary)}
    with overridden(ServerArgs(**STORAGE), fake=True, **slow) as container:
        container.page_carriers()
        for name in (*TIER_PROVIDERS, "runtime"):
            objects = _from_threads(container.providers[name])
            assert all(each is objects[0] for each in objects), name
    assert diary.entries == ["storage opened", "storage closed"]


def _slowly(diary: Diary) -> Callable[[Container], providers.Provider[object]]:
    opening = diary.opener()

    def slow(container: Container) -> providers.Provider[object]:
        opener = opening(container)()

        def wait_and_open() -> object:
            time.sleep(0.05)
            return opener()

        return providers.Object(wait_and_open)

    return slow


def _from_threads(provider: Callable[[], object]) -> list[object]:
    barrier = threading.Barrier(16)
    objects: list[object] = []

    def ask() -> None:
        barrier.wait()
        objects.append(provider())

    threads = [threading.Thread(target=ask) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(objects) == 16
    return objects


# -- refusals --------------------------------------------------------------------------------------------------------


def test_an_unknown_backend_is_refused_with_the_known_ones_before_a_model_is_touched() -> None:
    args = ServerArgs(model_path="/does/not/exist", enable_hierarchical_cache=True, hicache_storage_backend="disk")
    with pytest.raises(ConfigError, match=r"^--hicache-storage-backend='disk' .*known backends are file, obstore"):
        build_container(args)


def test_a_package_that_is_missing_is_an_error_only_for_the_backend_that_needs_it(mocker: MockerFixture) -> None:
    mocker.patch.dict(sys.modules, {"mooncake.store": None, "mooncake": None})
    with overridden(ServerArgs(**STORAGE), fake=True) as container:
        container.runtime()
    args = ServerArgs(**{**STORAGE, "hicache_storage_backend": "mooncake", "hicache_storage_path": "127.0.0.1:1"})
    with overridden(args, fake=True) as container:
        container.tree_cache()
        with pytest.raises(ConfigError, match=r"^--hicache-storage-backend='mooncake' .*cannot be imported"):
            container.runtime()


def test_options_reach_the_backend_and_its_refusal_names_the_flag() -> None:
    args = ServerArgs(**STORAGE, hicache_storage_options='{"colour": "red"}')
    with overridden(args, fake=True) as container:
        with pytest.raises(ConfigError, match=r"^--hicache-storage-options='colour=red' is not allowed"):
            container.runtime()


def test_pools_of_two_models_do_not_share_keys() -> None:
    def seed(model: ModelConfig) -> bytes:
        with overridden(ServerArgs(**STORAGE), fake=True, model=model) as container:
            return container.host_tier().storage_seed(Namespace())

    assert seed(FULL) == seed(FULL)
    assert seed(FULL) != seed(replace(FULL, rope_theta=1.0))


def test_host_pool_and_copies_are_part_of_what_must_be_free_beside_the_weights() -> None:
    files = files_of(tiny_llama())
    with overridden(ServerArgs(**TIERS), **files) as container:
        size, spec = container.host_size(), container.pool_spec()
        needed = (spec.num_pages + 1) * spec.page_bytes + container.step_bytes() + size.bytes_beside_pool
        assert size.bytes_beside_pool > 2 * spec.num_pages * spec.page_bytes

    def opened_with(free: int) -> None:
        with overridden(ServerArgs(**TIERS), **files, free_bytes=lambda _: providers.Object(lambda: free)) as container:
            container.runtime()

    opened_with(needed)
    with pytest.raises(ConfigError, match=r"^--max-total-tokens=256 .*the tiers below it 0\.\d\d GB and a step"):
        opened_with(needed - 1)
