"""Asking a dispatched step: whether it is done, and waiting for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.core.batch import NO_TOKEN
from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.models.sampler import SampledTokens
from app.runtime.dispatch import SectionResult
from app.runtime.step_handle import LocalStepHandle
from app.runtime.tier_moves import NoTierMoves

IDENTITY = CacheIdentity(RuntimeId("test"), Generation(1))


class SlowArray:
    """A device array that is not ready before `finish`, or that fails when it is read."""

    def __init__(self, values: np.ndarray, *, ready: bool = True, error: Exception | None = None) -> None:
        self._values = values
        self._ready = ready
        self._error = error
        self.reads = 0
        self.shape = values.shape

    def is_ready(self) -> bool:
        return self._ready

    def finish(self) -> None:
        self._ready = True

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.reads += 1
        if self._error:
            raise self._error
        return self._values


class Owner:
    """What a handle tells its runtime."""

    def __init__(self) -> None:
        self.read: list[LocalStepHandle] = []
        self.failures: list[str] = []
        self.handle: LocalStepHandle | None = None

    def lose_pool(self, _batch_id: int, reason: str) -> None:
        self.failures.append(reason)
        assert self.handle is not None
        self.handle.failed(reason)


def section(tokens: list[int], *, num_rows: int, width: int = 0, **kwargs: Any) -> tuple[SectionResult, SlowArray]:
    """A section with its bucket's padding; the array of tokens decides when it is ready."""
    size = len(tokens)
    array = SlowArray(np.array(tokens, np.int32), **kwargs)
    sampled = SampledTokens(
        array,
        np.full(size, -0.5, np.float32),
        np.tile(np.arange(width, dtype=np.int32), (size, 1)),
        np.zeros((size, width), np.float32),
    )
    ready = SampledTokens(*(each if isinstance(each, SlowArray) else SlowArray(each) for each in sampled))
    return SectionResult(ready, num_rows), array


def make_handle(owner: Owner, *sections: SectionResult, extend_samples: np.ndarray) -> LocalStepHandle:
    handle = LocalStepHandle(
        batch_id=7,
        num_rows=sum(each.num_rows for each in sections),
        extend_samples=extend_samples,
        identity=lambda: IDENTITY,
        on_read=owner.read.append,
        on_failure=owner.lose_pool,
        collect_ends=tuple,
        moves=NoTierMoves(),
        wait_s=0.0,
    )
    owner.handle = handle
    handle.started(list(sections))
    return handle


def test_rows_of_both_sections_come_in_the_plans_order_without_padding() -> None:
    decode, _ = section([11, 12, 13, 0], num_rows=3)
    extend, _ = section([21, 22], num_rows=2, width=2)
    handle = make_handle(Owner(), decode, extend, extend_samples=np.array([False, True]))

    completion = handle.wait()

    assert completion.token_ids.tolist() == [11, 12, 13, NO_TOKEN, 22]
    assert completion.top_token_ids.tolist() == [[0, 0]] * 3 + [[0, 1]] * 2
    assert completion.batch_id == handle.batch_id == 7


def test_done_tells_whether_wait_would_block() -> None:
    slow, array = section([1, 2], num_rows=2, ready=False)
    handle = make_handle(Owner(), slow, extend_samples=np.array([True, True]))

    assert not handle.done()
    array.finish()
    assert handle.done()
    handle.wait()
    assert handle.done()


def test_waiting_too_long_times_out_and_can_be_repeated() -> None:
    owner = Owner()
    slow, array = section([1, 2], num_rows=2, ready=False)
    handle = make_handle(owner, slow, extend_samples=np.array([True, True]))

    with pytest.raises(TimeoutError, match="step 7"):
        handle.wait(timeout=0.002)
    assert owner.read == []

    array.finish()
    assert handle.wait(timeout=0.002).token_ids.tolist() == [1, 2]


def test_a_step_is_read_once() -> None:
    owner = Owner()
    only, array = section([1, 2], num_rows=2)
    handle = make_handle(owner, only, extend_samples=np.array([True, True]))

    assert handle.wait() is handle.wait(timeout=0)

    assert array.reads == 1
    assert owner.read == [handle]


def test_a_device_error_becomes_the_completions_failure() -> None:
    owner = Owner()
    bad, _ = section([1, 2], num_rows=2, error=RuntimeError("out of HBM"))
    handle = make_handle(owner, bad, extend_samples=np.array([True, True]))

    completion = handle.wait()

    assert completion.failure is not None
    assert "out of HBM" in completion.failure
    assert completion.token_ids.tolist() == [NO_TOKEN, NO_TOKEN]
    assert owner.failures == [completion.failure]


def test_a_step_whose_pool_was_lost_is_done_and_failed() -> None:
    slow, array = section([1, 2], num_rows=2, ready=False)
    handle = make_handle(Owner(), slow, extend_samples=np.array([True, True]))

    handle.failed("another step failed")

    assert handle.done()
    assert handle.wait(timeout=0).failure == "another step failed"
    assert array.reads == 0


def test_the_plans_arrays_may_change_after_dispatch() -> None:
    """H08: which rows sampled is decided by the plan as it was dispatched."""
    samples = np.array([True, False])
    only, _ = section([1, 2], num_rows=2)
    handle = make_handle(Owner(), only, extend_samples=samples)

    samples[:] = [False, True]

    assert handle.wait().token_ids.tolist() == [1, NO_TOKEN]
