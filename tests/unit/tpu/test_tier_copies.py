"""Copies under way: begun without waiting, told when they are over, and what went wrong is told by the result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.core.transfers import OfEachPool
from app.tpu.mesh import make_mesh
from app.tpu.page_carriers import gather_each
from app.tpu.slow_copies import SlowCopies
from app.tpu.tier_copies import DeviceCopies
from tests.support.page_cases import PagedPool, hybrid_pool, some_ids


@pytest.fixture(scope="module")
def paged() -> PagedPool:
    paged = hybrid_pool("everything", make_mesh(1, "cpu"), page_size=2, dtype="float32")
    paged.fill(seed=1)
    return paged


@pytest.fixture(scope="module")
def gathered(paged):
    buffers = paged.pool.take()
    paged.pool.put(buffers)
    return gather_each(paged.carriers, buffers, some_ids(paged.carriers, 1, 3))


def values(contents) -> list[bytes]:
    return [np.asarray(array).tobytes() for array in jax.tree.leaves(contents)]


def test_a_copy_arrives_whole_and_says_how_much_it_moved(paged, gathered) -> None:
    copies = DeviceCopies(paged.carriers)

    out = copies.to_host(gathered)
    back = copies.to_device(out.result())

    assert values(back.result()) == values(out.result()) == values(gathered)
    assert out.ready()
    assert back.ready()
    assert out.num_bytes == back.num_bytes == 3 * sum(carrier.page_bytes for carrier in paged.carriers)


def test_a_copy_of_nothing_is_ready_at_once(paged) -> None:
    copy = DeviceCopies(paged.carriers).to_host(OfEachPool([], [], []))

    assert copy.ready()
    assert copy.num_bytes == 0
    assert copy.result() == OfEachPool([], [], [])


@jax.jit
def _busy(seed: jax.Array) -> jax.Array:
    """`seed`, which must be 0, after a tenth of a second or more."""
    square = jnp.full((256, 256), seed)
    return jax.lax.fori_loop(0, 500, lambda _, held: held @ held, square)[0, 0]


@jax.jit
def _chosen(page: tuple[jax.Array, ...], zero: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jnp.where(zero == 0, array, 1) for array in page)


@jax.jit
def _failing(page: tuple[jax.Array, ...], zero: jax.Array) -> tuple[jax.Array, ...]:
    """`page`, were there 2**60 bytes to compute it with."""
    huge = jax.lax.sort(jax.lax.iota(jnp.uint8, 2**60) * zero.astype(jnp.uint8))
    return tuple(array + huge[-1].astype(array.dtype) for array in page)


def test_a_copy_is_not_ready_before_what_it_copies_is_computed(paged, gathered) -> None:
    page, zero = gathered.states[0], jnp.float32(0)
    jax.block_until_ready(_chosen(page, _busy(zero)))  # compiled
    late = _chosen(page, _busy(zero))

    copy = DeviceCopies(paged.carriers).to_host(OfEachPool([], [], [late]))

    assert not copy.ready() or late[0].is_ready()
    assert values(copy.result()) == values(page)
    assert copy.ready()


def test_a_copy_of_what_failed_is_ready_and_raises(paged, gathered) -> None:
    page, zero = gathered.states[0], jnp.float32(0)
    program = _failing.lower(page, zero).compile()
    failed = program(page, _busy(zero))  # fails when it runs, after this has returned

    copy = DeviceCopies(paged.carriers).to_host(OfEachPool([], [], [failed]))

    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        copy.result()
    assert copy.ready()


def test_the_double_is_late_never_over_or_failed_as_told(paged, gathered) -> None:
    copies = SlowCopies(DeviceCopies(paged.carriers), late={1: 2}, never={2}, fail={3})
    sound, late, never, failed = (copies.to_host(gathered) for _ in range(4))
    jax.block_until_ready((sound.result(), late.result()))

    assert sound.ready()
    assert [late.ready() for _ in range(4)] == [False, False, True, True]
    assert [never.ready() for _ in range(4)] == [False] * 4
    with pytest.raises(TimeoutError, match="copy 2"):
        never.result()
    assert failed.ready()
    with pytest.raises(RuntimeError, match="injected failure of copy 3"):
        failed.result()
    assert {copy.num_bytes for copy in (sound, late, never, failed)} == {sound.num_bytes}


def test_the_double_counts_both_directions(paged, gathered) -> None:
    copies = SlowCopies(DeviceCopies(paged.carriers), fail={1})
    there = copies.to_host(gathered).result()

    with pytest.raises(RuntimeError, match="copy 1"):
        copies.to_device(there).result()

    assert values(copies.to_device(there).result()) == values(gathered)
    assert copies.num_begun == 3
