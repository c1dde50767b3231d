"""The boundary as it is used: two calls a step, and none of them reaches anything else of the runtime's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from dependency_injector import providers

from app.errors import OutOfPagesError, RuntimeClosedError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.req_to_token_pool import ReqToTokenPool
from app.providers.testing import Override
from app.runtime.local import new_identity
from app.tpu.cpu_fake import FakeDevicePool, FakeModelRunner
from tests.support.engine import VOCAB_SIZE, Engine, RuntimeSpy

OpenEngine = Callable[..., Engine]

# Control's own memory, or shapes: reading them reaches nothing.
NOT_CALLS = {"identity", "spec", "port"}


@dataclass
class Meter:
    """Counts what control asks of the runtime's objects; what the runtime asks of its own parts is its own affair."""

    calls: Counter[str] = field(default_factory=Counter)
    depth: int = 0

    def inside(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.depth += 1
        try:
            return call(*args, **kwargs)
        finally:
            self.depth -= 1

    def count(self, name: str) -> None:
        if self.depth == 0:
            self.calls[name] += 1


class Metered:
    """Stands for one object of the runtime; whatever is read from it is counted."""

    def __init__(self, meter: Meter, owner: str, real: Any) -> None:
        self._meter, self._owner, self._real = meter, owner, real

    def __getattr__(self, name: str) -> Any:
        if name not in NOT_CALLS:
            self._meter.count(f"{self._owner}.{name}")
        return getattr(self._real, name)


def metered_parts(meter: Meter) -> dict[str, Override]:
    """Every object that the runtime owns, behind a counting proxy."""

    def behind(owner: str, make: Callable[[Any], providers.Provider[Any]]) -> Override:
        return lambda container: providers.ThreadSafeSingleton(Metered, meter, owner, make(container))

    return {
        "token_allocator": behind(
            "allocator",
            lambda c: providers.Singleton(
                PagedTokenToKVPoolAllocator, c.pool_size, c.page_size, providers.Singleton(new_identity)
            ),
        ),
        "device_pool": behind("pool", lambda c: providers.Singleton(FakeDevicePool, c.pool_spec, c.mesh)),
        "req_to_token_pool": behind(
            "rows",
            lambda c: providers.Singleton(
                ReqToTokenPool,
                num_rows=c.server_args.provided.max_running_requests,
                max_pages=c.pool_size,
                mesh=c.mesh,
            ),
        ),
        "model_runner": behind("runner", lambda _: providers.Singleton(FakeModelRunner, VOCAB_SIZE)),
    }


def watch_runtime(meter: Meter, runtime: Any) -> None:
    """Count the calls to the runtime itself, and what happens inside them as its own affair."""

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any) -> Any:
            meter.count(f"runtime.{name}")
            return meter.inside(call, *args)

        return wrapper

    for name in dir(runtime):
        if not name.startswith("_") and name not in NOT_CALLS:
            setattr(runtime, name, watched(name, getattr(runtime, name)))


@pytest.fixture
def metered(engine: OpenEngine) -> Callable[..., tuple[Engine, Meter]]:
    def open_metered(**fields: Any) -> tuple[Engine, Meter]:
        meter = Meter()
        opened = engine(overrides=metered_parts(meter), check_invariants=False, **fields)
        watch_runtime(meter, opened.runtime)
        meter.calls.clear()
        return opened, meter

    return open_metered


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache_type", ["unified_radix_cache", "radix_cache", "chunk_cache"])
def test_a_step_costs_two_calls_whatever_moves(metered: Any, cache_type: str, overlap: bool) -> None:
    """Admissions, releases, evictions, retractions, duplicates: they all travel in the same two calls."""
    # given: a pool too small for everybody
    engine, meter = metered(cache_type=cache_type, disable_overlap=not overlap, max_total_tokens=128)
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 256, 24).tolist()
    for index in range(12):
        prompt = shared[: 4 * (index % 7)] + rng.integers(0, 256, 1 + index).tolist()
        engine.add(prompt, max_tokens=20 + index)

    # when
    busy = 0
    while engine.scheduler.has_work():
        before = meter.calls.copy()
        engine.step()
        called = meter.calls - before
        busy += bool(called)

        # then
        assert called in ({}, {"runtime.prepare_batch": 1, "runtime.execute_batch": 1})
    assert busy > 30
    assert engine.scheduler.num_retractions > 0
    engine.check_replies()


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_a_step_costs_two_calls_for_any_batch_size(metered: Any, batch: int) -> None:
    engine, meter = metered(max_running_requests=16, max_total_tokens=512, chunked_prefill_size=64)
    for index in range(batch):
        engine.add([index, 1, 2], max_tokens=6)

    engine.drain()

    assert meter.calls["runtime.prepare_batch"] == meter.calls["runtime.execute_batch"]
    assert meter.calls.keys() == {"runtime.prepare_batch", "runtime.execute_batch"}
    assert meter.calls.total() <= 2 * 9  # a chunk, five decodes, a surplus step, and the last releases


def test_a_refused_prepare_costs_one_call_more(engine: OpenEngine) -> None:
    """Rule (d): retract, and prepare again, once."""
    # given
    opened = engine(max_total_tokens=128)
    for index in range(3):
        opened.add([index, 1, 2, 3, 4], max_tokens=12)
    opened.step(4)
    spy = RuntimeSpy(opened.runtime)

    # when
    spy.refusals.append(OutOfPagesError(need=1, free=0))
    opened.step()

    # then
    assert spy.calls == ["prepare", "prepare", "execute"]
    assert opened.scheduler.num_retractions == 1
    opened.drain()
    opened.check_replies()


def test_waiting_for_a_step_is_not_a_call(metered: Any) -> None:
    engine, meter = metered()
    engine.add([1, 2, 3], max_tokens=2)
    engine.step()
    meter.calls.clear()

    for step in engine.scheduler._in_flight:
        step.handle.done()
        step.handle.wait()

    assert not meter.calls


def test_frees_travel_once_and_only_with_plans(engine: OpenEngine) -> None:
    """What control frees is counted as recorded until a plan has carried it, and by no plan twice."""
    opened = engine(cache_type="chunk_cache")
    spy = RuntimeSpy(opened.runtime)
    opened.add(range(10), max_tokens=2)
    opened.step(3)
    assert opened.scheduler.ledger()["recorded"] == 3

    opened.drain()

    carried = np.concatenate([plan.free_pages for plan in spy.plans])
    handed_out = np.concatenate([prepared.pages for prepared in spy.prepared])
    assert sorted(carried.tolist()) == sorted(handed_out.tolist())
    assert opened.scheduler.ledger()["recorded"] == 0


def test_a_closed_container_refuses_and_opens_nothing(engine: OpenEngine) -> None:
    opened = engine()
    opened.serve([1, 2, 3], max_tokens=2)
    opened.add([1, 2, 3], max_tokens=2)

    opened.container.shutdown_resources()

    with pytest.raises(RuntimeClosedError):
        opened.scheduler.step()
    with pytest.raises(RuntimeClosedError):
        opened.container.runtime()
    opened.scheduler.abort("r1")
    opened.step()


def test_close_and_open_refuses_everything_older_and_empties_the_tree(engine: OpenEngine) -> None:
    """Point 7: whatever ran ends with an error, whatever waits is served from the new, empty pool."""
    # given
    opened = engine(max_running_requests=1)
    prompt = list(range(20))
    opened.serve(prompt, max_tokens=2)
    running, waiting = opened.add(prompt, max_tokens=40), opened.add([*prompt, 1], max_tokens=4)
    opened.step(3)
    receipt = opened.container.tree_cache().lock(opened.container.tree_cache().insert(*_published(opened)))
    generation = opened.runtime.identity.generation

    # when
    opened.runtime.close()
    opened.runtime.open()
    opened.step()

    # then
    assert opened.runtime.identity.generation == generation + 1
    assert opened.outputs[running].finish_reason == "error"
    assert "reopened" in opened.outputs[running].error
    assert opened.cached_pages == 0
    with pytest.raises(Exception, match="stale"):
        opened.container.tree_cache().unlock(receipt)
    opened.drain()
    assert opened.outputs[waiting].cached_tokens == 0
    opened.check_replies()


def _published(opened: Engine) -> tuple[Any, np.ndarray]:
    """A key that is cached, with its pages."""
    from app.core.keys import RadixKey

    found = opened.container.tree_cache().match(RadixKey.of(np.arange(20, dtype=np.int32)))
    return RadixKey.of(np.arange(found.num_tokens, dtype=np.int32)), found.pages
