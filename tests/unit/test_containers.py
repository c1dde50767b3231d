"""The container: every provider is built, wired to the same parts, swapped whole and closed for good."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from dependency_injector import providers

from app.caches.registry import CacheTypeRegistry
from app.config.model_config import Component
from app.config.server_args import ServerArgs
from app.containers import Container, build_container
from app.core.sampling import SamplingParams
from app.errors import (
    CacheTypeConflictError,
    ConfigError,
    RegistrationError,
    RuntimeClosedError,
    UnknownCacheTypeError,
)
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.models.model_runner import LlamaModelRunner
from app.observability.kv_events import KvEventRecorder, KvEventReplica
from app.providers.testing import fake_device_pool, overridden
from app.runtime.local import new_identity
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from app.tpu.cpu_fake import FakeDevicePool, FakeModelRunner, fake_model_config
from app.tpu.kv_pool import MHATokenToKVPool
from tests.support.tiny_llama import files_of, tiny_llama

ARGS = ServerArgs(page_size=4, max_total_tokens=256, max_running_requests=4)
PUBLIC_PROVIDERS = (
    *("server_args", "model_config", "registry", "page_size", "tp_rank", "tp_size", "mesh", "pool_size"),
    *("device_pool", "token_allocator", "req_to_token_pool", "model_runner", "tokenizer", "runtime"),
    *("cache_type", "tree_cache", "scheduler_adapter", "scheduler"),
)
TINY_LLAMA_FILES = files_of(tiny_llama())


def answer(container: Container, name: str = "r", tokens: int = 6) -> list[int]:
    prompt = np.arange(1, 20, dtype=np.int32)
    request = Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(max_tokens=tokens))
    output = generate_all(container.scheduler(), [request])[0]
    container.scheduler().check_integrity()
    container.runtime().check_integrity()
    return output.token_ids


def test_every_named_provider_is_built_with_the_fakes():
    with overridden(ARGS, fake=True) as container:
        built = {name: container.providers[name]() for name in container.providers if name != "checkpoint"}
    assert set(PUBLIC_PROVIDERS) <= set(built)
    assert all(built[name] is not None for name in PUBLIC_PROVIDERS)


def test_every_named_provider_is_built_with_the_real_model():
    with overridden(ARGS, **TINY_LLAMA_FILES) as container:
        built = {name: container.providers[name]() for name in container.providers}
        assert isinstance(built["device_pool"], MHATokenToKVPool)
        assert isinstance(built["model_runner"], LlamaModelRunner)
        assert len(answer(container)) == 6


@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
def test_every_arm_builds_its_cache_and_keeps_it(cache_type):
    args = ServerArgs(page_size=4, max_total_tokens=256, cache_type=cache_type)
    with overridden(args, fake=True) as container:
        cache = container.tree_cache()
        assert container.tree_cache() is cache
        assert container.cache_type().name == cache_type
        assert container.scheduler_adapter()._cache is cache
        assert cache.token_allocator is container.token_allocator().port


def test_every_registered_type_has_an_arm():
    with overridden(ARGS, fake=True) as container:
        arms = container.tree_cache.providers
        assert set(arms) == set(container.registry().names())
        for arm in arms.values():
            arm().check_integrity()


def test_tree_and_runtime_share_the_containers_parts():
    with overridden(ARGS, fake=True) as container:
        cache, runtime = container.tree_cache(), container.runtime()
        assert container.cache_deps().device_pool is container.device_pool()
        assert runtime.identity is cache.token_allocator.identity
        before = cache.token_allocator.available()
        answer(container)
        # What the runtime reserved and the tree kept shows in the one allocator.
        assert cache.token_allocator.available() == before - cache.evictable_pages
        assert cache.evictable_pages > 0


def test_building_the_cache_loads_no_weights_and_opens_nothing():
    def refuse(_):
        return providers.Factory(_explode)

    with overridden(ARGS, fake=True, model_runner=refuse) as container:
        cache = container.tree_cache()
        cache.check_integrity()
        with pytest.raises(AssertionError, match="weights"):
            container.runtime()


def _explode():
    raise AssertionError("weights were asked for")


def test_two_containers_share_no_object():
    """H20."""
    shared_by_design = {"server_args", "tp_rank", "page_size", "tp_size", "progress", "events", "dtype", "pool_dtype"}
    with overridden(ARGS, fake=True) as first, overridden(ARGS, fake=True) as second:
        for name in set(PUBLIC_PROVIDERS) - shared_by_design - {"pool_size", "mesh"}:
            assert first.providers[name]() is not second.providers[name](), name
        answer(first)
        assert second.tree_cache().evictable_pages == 0
        assert first.runtime().identity != second.runtime().identity


def test_swapping_the_device_pool_alone_runs_the_real_model_on_it_with_equal_output():
    with overridden(ARGS, **TINY_LLAMA_FILES) as container:
        expected = answer(container)
    with overridden(ARGS, device_pool=fake_device_pool, **TINY_LLAMA_FILES) as container:
        assert isinstance(container.device_pool(), FakeDevicePool)
        assert isinstance(container.model_runner(), LlamaModelRunner)
        assert answer(container) == expected
        assert not container.device_pool().lost()


def test_recorded_events_rebuild_the_content_of_the_cache():
    recorder = KvEventRecorder(page_size=ARGS.page_size)
    replica = KvEventReplica()
    with overridden(ARGS, fake=True, events=lambda _: providers.Object(recorder)) as container:
        for length in range(5, 60, 6):  # more than the pool holds: some are evicted
            prompt = np.full(length, length, np.int32)
            params = SamplingParams(max_tokens=6, ignore_eos=True)
            generate_all(container.scheduler(), [Request(request_id="r", prompt_token_ids=prompt, sampling=params)])
            replica.apply(recorder.drain())
            cache = container.tree_cache()
            assert len(replica.page_hashes) == cache.evictable_pages + cache.protected_pages
        assert container.scheduler().flush_cache() == len(replica.page_hashes) > 0
        replica.apply(recorder.drain())
        assert not replica.page_hashes


def test_an_override_leaves_no_trace_also_after_an_error_in_its_block():
    """H20."""
    with pytest.raises(ZeroDivisionError):
        _fail_inside_an_override()
    plain = build_container(ARGS)
    assert plain.device_pool.overridden == ()
    assert plain.model_runner.overridden == ()
    with overridden(ARGS, **TINY_LLAMA_FILES) as container:
        assert not isinstance(container.device_pool(), FakeDevicePool)


def _fail_inside_an_override() -> None:
    with overridden(ARGS, fake=True) as swapped:
        answer(swapped)
        raise ZeroDivisionError


def test_an_override_entered_after_an_engine_has_run_works():
    with overridden(ARGS, **TINY_LLAMA_FILES) as running:
        real = answer(running)
        with overridden(ARGS, fake=True) as swapped:
            assert isinstance(swapped.model_runner(), FakeModelRunner)
            assert answer(swapped) != real
        assert answer(running, "again") == real


def test_nested_overrides_do_not_reach_one_another():
    """H20."""
    with overridden(ARGS, fake=True) as outer:
        expected = answer(outer)
        with overridden(ARGS, fake=True, token_allocator=_sixteen_pages) as inner:
            assert inner.tree_cache().token_allocator.capacity == 16
            assert answer(inner) == expected
        assert outer.tree_cache().token_allocator.capacity == 64
        assert answer(outer, "again") == expected
    with overridden(ARGS, fake=True) as later:
        assert later.tree_cache().token_allocator.capacity == 64


def _sixteen_pages(_: Container) -> providers.Provider[object]:
    return providers.ThreadSafeSingleton(PagedTokenToKVPoolAllocator, 16, ARGS.page_size, new_identity())


def test_an_unknown_provider_name_is_refused():
    with pytest.raises(ConfigError, match="device_poool"), overridden(ARGS, device_poool=fake_device_pool):
        pass


def test_a_closed_container_refuses_instead_of_opening_another_runtime():
    with overridden(ARGS, fake=True) as container:
        scheduler = container.scheduler()
        answer(container)
    with pytest.raises(RuntimeClosedError):
        container.runtime()
    scheduler.add(Request(request_id="late", prompt_token_ids=np.arange(1, 9, dtype=np.int32)))
    with pytest.raises(RuntimeClosedError):
        scheduler.step()


def test_a_container_closed_before_use_refuses_too():
    container = build_container(ARGS)
    with overridden(ARGS, fake=True) as never_used:
        pass
    with pytest.raises(RuntimeClosedError):
        never_used.runtime()
    container.shutdown_resources()


def test_shutting_down_twice_is_harmless():
    with overridden(ARGS, fake=True) as container:
        container.runtime()
        container.shutdown_resources()
        container.shutdown_resources()


def test_sixteen_threads_get_one_object_of_each_provider():
    """H19."""
    with overridden(ARGS, fake=True, model_runner=lambda _: providers.ThreadSafeSingleton(_slow_runner)) as container:
        for name in PUBLIC_PROVIDERS:
            objects = _from_threads(container.providers[name])
            assert all(each is objects[0] for each in objects), name
            assert objects[0] is not None, name


def test_a_constructor_that_fails_once_is_tried_again():
    """H19."""
    attempts: list[int] = []

    def sometimes():
        attempts.append(1)
        if len(attempts) == 1:
            raise OSError("not yet")
        return FakeModelRunner(257)

    with overridden(ARGS, fake=True, model_runner=lambda _: providers.ThreadSafeSingleton(sometimes)) as container:
        with pytest.raises(OSError, match="not yet"):
            container.model_runner()
        assert container.model_runner() is container.model_runner()
        assert len(answer(container)) == 6


def _slow_runner() -> FakeModelRunner:
    time.sleep(0.05)
    return FakeModelRunner(257)


def _from_threads(provider) -> list[object]:
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


def test_decode_with_another_type_is_refused_before_a_pool_or_a_model_is_touched():
    args = ServerArgs(model_path="/does/not/exist", cache_type="radix_cache", disaggregation_mode="decode")
    with pytest.raises(CacheTypeConflictError, match=r"--cache-type.*--disaggregation-mode"):
        build_container(args)


def test_an_unknown_cache_type_lists_the_known_ones():
    with pytest.raises(UnknownCacheTypeError, match=r"known cache types are .*radix_cache"):
        build_container(ServerArgs(cache_type="radix_cash"))


def test_a_type_registered_later_serves_later_containers_and_earlier_ones_say_so():
    registry = CacheTypeRegistry()
    full = [frozenset({Component.FULL})]
    with overridden(ARGS, fake=True) as container:
        radix = container.registry().get("radix_cache").ctor
    registry.register("radix_cache", radix, components=full, builtin=True)
    with overridden(ARGS, fake=True, registry=registry) as earlier:
        registry.register("late_cache", radix, components=full)
        with pytest.raises(RegistrationError, match="sealed"):
            earlier.registry().get("late_cache")
    args = ServerArgs(page_size=4, max_total_tokens=256, cache_type="late_cache")
    with overridden(args, fake=True, registry=registry) as later:
        assert len(answer(later)) == 6


@pytest.mark.parametrize(
    ("components", "expected"),
    [
        ({Component.FULL}, "unified_radix_cache"),
        ({Component.FULL, Component.SWA}, "unified_radix_cache"),
        ({Component.FULL, Component.RECURRENT}, "unified_radix_cache"),
        ({Component.FULL, Component.SWA, Component.RECURRENT}, "unified_radix_cache"),
        ({Component.SWA, Component.RECURRENT}, "chunk_cache"),
    ],
)
def test_the_models_components_choose_the_cache(components, expected):
    model = replace(fake_model_config(), components=frozenset(components))
    with overridden(ARGS, fake=True, model=model) as container:
        assert container.cache_type().name == expected


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_disaggregated_nodes_serve_whole_requests_for_now(mode):
    args = ServerArgs(page_size=4, max_total_tokens=256, disaggregation_mode=mode)
    with overridden(args, fake=True) as container:
        assert container.cache_type().name == ("chunk_cache" if mode == "decode" else "unified_radix_cache")
        assert len(answer(container)) == 6
