"""The pool of pages and states of a hybrid model: lent as one, copied slot by slot, written in place."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from app.config.model_config import StateArray
from app.core.ports import PoolSpec, StateSpec
from app.errors import OwnershipError, RuntimeClosedError
from app.tpu.hybrid_fake import FakeHybridPool
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.hybrid_pool import HybridKVPool, state_copy_programs
from app.tpu.mesh import make_mesh

SPEC = PoolSpec(num_pages=6, page_size=4, num_layers=2, num_kv_heads=1, head_dim=8, dtype="float32")
WINDOW = PoolSpec(num_pages=3, page_size=4, num_layers=3, num_kv_heads=1, head_dim=8, dtype="float32")
STATES = StateSpec(
    num_snapshots=4, num_rows=2, num_layers=2, arrays=(StateArray(shape=(3, 2), sharded_axis=0), StateArray(shape=(5,)))
)
HYBRID = HybridSpec(full=SPEC, window=WINDOW, states=STATES)


@pytest.fixture
def pool():
    pool = HybridKVPool(SPEC, HYBRID, make_mesh(1, "cpu"))
    pool.open()
    yield pool
    assert not pool.lost()
    pool.close()


def fill_states(pool: HybridKVPool) -> None:
    """Slot s holds s everywhere, 0 zeros."""
    buffers = pool.take()

    def by_slot(array: jax.Array) -> jax.Array:
        numbers = np.arange(array.shape[0], dtype=np.float32).reshape(-1, *(1,) * (array.ndim - 1))
        return array + numbers

    pool.put(buffers._replace(states=jax.tree.map(by_slot, buffers.states)))


def test_arrays_are_there_for_each_kind_of_layer_with_a_page_of_padding(pool: HybridKVPool) -> None:
    buffers = pool.take()
    pool.put(buffers)
    assert [array.shape for array in (*buffers.full.keys, *buffers.full.values)] == [(7, 4, 8)] * 4
    assert [array.shape for array in (*buffers.window.keys, *buffers.window.values)] == [(4, 4, 8)] * 6
    assert [[array.shape for array in layer] for layer in buffers.states] == [[(7, 3, 2), (7, 5)]] * 2
    total = sum(array.nbytes for array in jax.tree.leaves(buffers))
    assert total == 7 * SPEC.page_bytes + 4 * WINDOW.page_bytes + STATES.num_slots * STATES.slot_bytes


def test_a_latent_pool_has_keys_alone() -> None:
    latent = PoolSpec(
        num_pages=2, page_size=4, num_layers=2, num_kv_heads=1, head_dim=12, dtype="float32", arrays_per_layer=1
    )
    pool = HybridKVPool(latent, HybridSpec(full=latent), make_mesh(1, "cpu"))
    buffers = pool.abstract_buffers()
    assert [array.shape for array in buffers.full.keys] == [(3, 4, 12)] * 2
    assert (buffers.full.values, buffers.window.keys, buffers.states) == ((), (), ())
    assert latent.page_bytes == 2 * 4 * 12 * 4


def test_states_are_copied_between_slots_and_nowhere_else(pool: HybridKVPool) -> None:
    fill_states(pool)
    pool.copy_states(np.array([0, 2, 6], np.int32), np.array([5, 3, 1], np.int32))
    for array in pool.state_contents(np.arange(7)):
        assert array.reshape(7, -1)[:, 0].tolist() == [0, 6, 2, 2, 4, 0, 6]


def test_copying_nothing_dispatches_nothing(pool: HybridKVPool) -> None:
    before = pool.take()
    pool.put(before)
    pool.copy_states(np.empty(0, np.int32), np.empty(0, np.int32))
    after = pool.take()
    pool.put(after)
    assert after is before


def test_copies_are_written_in_place(pool: HybridKVPool) -> None:
    pool.copy_states(np.array([1], np.int32), np.array([2], np.int32))
    pointers = [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pool._buffers)]
    pool.copy_states(np.array([3], np.int32), np.array([4], np.int32))
    assert [array.unsafe_buffer_pointer() for array in jax.tree.leaves(pool._buffers)] == pointers


def test_the_listed_program_is_the_one_that_is_dispatched(pool: HybridKVPool) -> None:
    (program,) = state_copy_programs(pool.abstract_buffers().states, 2)
    lowered = program.lower(make_mesh(1, "cpu"))
    temporaries = lowered.compile().memory_analysis()
    assert temporaries.alias_size_in_bytes == program.donated_bytes
    before = program.function._cache_size()
    pool.copy_states(np.array([1], np.int32), np.array([2], np.int32))
    pool.copy_states(np.array([1, 3], np.int32), np.array([2, 4], np.int32))
    assert program.function._cache_size() - before <= 1


def test_lending_is_as_strict_as_that_of_every_pool(pool: HybridKVPool) -> None:
    buffers = pool.take()
    with pytest.raises(OwnershipError):
        pool.take()
    pool.put(buffers)
    with pytest.raises(OwnershipError):
        pool.put(buffers)
    closed = HybridKVPool(SPEC, HybridSpec(full=SPEC), make_mesh(1, "cpu"))
    with pytest.raises(RuntimeClosedError):
        closed.copy_states(np.array([1], np.int32), np.array([2], np.int32))


def test_the_fake_kills_what_it_lent_and_poisons_each_kind() -> None:
    pool = FakeHybridPool(SPEC, HYBRID)
    pool.open()
    lent = jax.tree.leaves(pool.take())
    pool.put(jax.tree.map(lambda array: array + 0, pool._lent))
    assert all(array.is_deleted() for array in lent)
    for poison, contents in (
        (pool.poison, pool.page_contents),
        (pool.poison_window, pool.window_contents),
        (pool.poison_states, pool.state_contents),
    ):
        poison(np.array([2], np.int32))
        for array in contents(np.arange(4)):
            assert (array[2] != 0).all()
            assert not array[[0, 1, 3]].any()
