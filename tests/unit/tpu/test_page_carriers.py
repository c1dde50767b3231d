"""Pages leave the pool and come back to other places of it: every bit of them, and nothing else is touched."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import pytest

from app.core.transfers import OfEachPool, PageIds
from app.errors import ConfigError, ForeignPageError
from app.tpu.mesh import make_mesh
from app.tpu.page_carriers import GROUP_SIZES, gather_each
from app.tpu.pool_layout import ArrayPerLayer, PoolLayout
from tests.support.compiling import compiled_programs
from tests.support.forced_devices import run_on_eight_devices
from tests.support.page_cases import (
    HYBRIDS,
    LAYOUTS,
    NUM_PAGES,
    NUM_SNAPSHOTS,
    PagedPool,
    flat_pool,
    hybrid_pool,
    some_ids,
)
from tests.support.page_round_trip import SHARED_KINDS, backed_up, differences

MESH = make_mesh(1, "cpu")
MORE_THAN_A_GROUP = GROUP_SIZES[0] + 1
FEWER = 2


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def plain(dtype: str = "float32", page_size: int = 2) -> PagedPool:
    return flat_pool(ArrayPerLayer(), MESH, page_size=page_size, dtype=dtype)


def everything() -> PagedPool:
    return hybrid_pool("everything", MESH, page_size=2, dtype="float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16_bits", slow("bfloat16")])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_pages_of_keys_and_values_come_back_bit_by_bit(layout: PoolLayout, dtype: str) -> None:
    assert differences(flat_pool(layout, MESH, page_size=4, dtype=dtype), MORE_THAN_A_GROUP) == []


@pytest.mark.parametrize("page_size", [1, 16, slow(64)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_pages_of_any_size_come_back_bit_by_bit(layout: PoolLayout, page_size: int) -> None:
    assert differences(flat_pool(layout, MESH, page_size=page_size, dtype="float32"), FEWER) == []


@pytest.mark.parametrize("kind", [slow("window"), slow("recurrent"), "everything", "latent", "no full layer"])
def test_every_array_of_every_kind_comes_back_bit_by_bit(kind: str) -> None:
    """The pool is a fake that kills what was donated: nobody may use it afterwards."""
    assert differences(hybrid_pool(kind, MESH, page_size=2, dtype="bfloat16_bits"), MORE_THAN_A_GROUP) == []


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_every_kind_in_pages_of_any_size(page_size: int) -> None:
    assert differences(hybrid_pool("everything", MESH, page_size=page_size, dtype="float32"), MORE_THAN_A_GROUP) == []


@pytest.mark.slow
def test_the_same_over_several_ranks() -> None:
    told = run_on_eight_devices("tests.support.page_round_trip")

    assert {name: broken for name, broken in told.items() if broken} == {}
    assert len(told) == 2 * (2 * len(LAYOUTS) + len(SHARED_KINDS))


def test_no_page_at_all_is_no_program_at_all() -> None:
    paged = everything()
    with compiled_programs() as compiled:
        assert differences(paged, 0) == []
        contents = backed_up(paged, PageIds())

    assert contents == OfEachPool([], [], [])
    assert [name for name in compiled if "read" in name or "write" in name] == []


def test_any_number_of_pages_takes_few_programs() -> None:
    paged = flat_pool(ArrayPerLayer(), MESH, page_size=3, dtype="float32")  # of a shape of its own
    with compiled_programs() as compiled:
        for number in range(1, NUM_PAGES + 1):
            assert differences(paged, number) == []

    assert len([name for name in compiled if name == "jit(_read)"]) == len(GROUP_SIZES)
    assert len([name for name in compiled if name == "jit(_write)"]) == len(GROUP_SIZES)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_page_is_of_as_many_bytes_as_the_pool_says(layout: PoolLayout) -> None:
    paged = flat_pool(layout, MESH, page_size=4, dtype="bfloat16_bits")
    carrier = paged.carriers.pages
    (page,), _, _ = backed_up(paged, PageIds(np.array([3], np.int32)))

    assert carrier.page_bytes == paged.pool.spec.page_bytes == sum(array.nbytes for array in page)


def test_a_snapshot_is_of_as_many_bytes_as_a_slot_and_a_page_without_layers_is_none() -> None:
    pages, window, states = hybrid_pool("no full layer", MESH, page_size=2, dtype="float32").carriers

    assert (pages.page_bytes, pages.page, window) == (0, (), None)
    assert states.page_bytes == 2 * 4 * (4 * 3 * 2 + 8 * 3 + 5)
    assert len(states.page) == 3  # one array for each of a layer's


def test_host_pages_are_in_pinned_host_memory_and_what_returns_is_not() -> None:
    paged = everything()
    contents = backed_up(paged, some_ids(paged.carriers, 1, 2))

    for carrier, pages in zip(paged.carriers, contents, strict=True):
        for page, returned in zip(pages, carrier.to_device(pages), strict=True):
            assert [(array.shape, array.dtype, array.sharding) for array in page] == [
                (array.shape, array.dtype, array.sharding) for array in carrier.page
            ]
            assert {array.sharding.memory_kind for array in page} == {"pinned_host"}
            assert {array.sharding.memory_kind for array in returned} == {"device"}


def test_what_was_gathered_stays_as_it_was_when_the_pool_is_written() -> None:
    paged = plain()
    paged.fill(seed=1)
    before = paged.arrays()
    buffers = paged.pool.take()
    gathered = gather_each(paged.carriers, buffers, PageIds(np.array([5], np.int32)))
    paged.pool.put(buffers)

    paged.fill(seed=2)

    np.testing.assert_array_equal(gathered.pages[0][0], np.stack([array[5] for array in before]))


@pytest.mark.parametrize("kind", HYBRIDS)
def test_bytes_make_the_same_page_and_nobody_can_write_to_them(kind: str) -> None:
    paged = hybrid_pool(kind, MESH, page_size=2, dtype="float32")
    paged.fill(seed=1)
    contents = backed_up(paged, some_ids(paged.carriers, 1, 1))
    for carrier, pages in zip(paged.carriers, contents, strict=True):
        if carrier is None:
            continue
        payload = carrier.to_bytes(pages[0])
        assert payload.dtype == np.uint8
        assert payload.shape == (carrier.page_bytes,)
        assert payload.flags.c_contiguous
        assert not payload.flags.writeable
        again = payload.copy()
        made = carrier.from_bytes(again)
        again[:] = 0  # the page is a copy
        assert [array.sharding for array in made] == [array.sharding for array in pages[0]]
        np.testing.assert_array_equal(carrier.to_bytes(made), payload)


def test_bytes_of_another_length_are_refused() -> None:
    carrier = plain().carriers.pages
    for payload in (np.zeros(carrier.page_bytes - 1, np.uint8), np.zeros(carrier.page_bytes, np.int8)):
        with pytest.raises(ConfigError, match="one page"):
            carrier.from_bytes(payload)


@pytest.mark.parametrize("foreign", [0, -1, NUM_PAGES + 1])
def test_an_id_that_is_no_page_is_refused_before_anything_is_lost(foreign: int) -> None:
    paged = plain()
    ids = np.array([1, foreign], np.int32)
    (page, _), _, _ = backed_up(paged, PageIds(np.array([1, 2], np.int32)))
    buffers = paged.pool.take()
    paged.pool.put(buffers)

    with pytest.raises(ForeignPageError):
        paged.carriers.pages.gather(buffers, ids)
    with pytest.raises(ForeignPageError):
        paged.carriers.pages.scatter(buffers, ids, paged.carriers.pages.to_device([page, page]))
    assert not any(array.is_deleted() for array in jax.tree.leaves(buffers))


def test_a_running_state_is_no_snapshot() -> None:
    paged = everything()
    buffers = paged.pool.take()
    with pytest.raises(ForeignPageError):
        paged.carriers.states.gather(buffers, np.array([NUM_SNAPSHOTS + 1], np.int32))


def test_pages_become_bytes_and_bytes_pages_in_other_threads_while_this_one_dispatches() -> None:
    paged = plain(page_size=16)
    paged.fill(1)
    (carrier, *_), ids = paged.carriers, np.arange(1, 1 + NUM_PAGES, dtype=np.int32)
    assert carrier is not None
    buffers = paged.pool.take()
    on_host = jax.block_until_ready(carrier.to_host(carrier.gather(buffers, ids)))
    expected = [np.asarray(page[0]).tobytes() for page in on_host]

    def there_and_back(number: int) -> bytes:
        page = on_host[number % len(on_host)]
        for _ in range(20):
            page = carrier.from_bytes(carrier.to_bytes(page))
        assert [array.sharding for array in page] == [array.sharding for array in on_host[0]]
        return carrier.to_bytes(page).tobytes()

    with ThreadPoolExecutor(4) as threads:
        made = threads.map(there_and_back, range(64))
        for _ in range(20):
            jax.block_until_ready(carrier.gather(buffers, ids))
        assert list(made) == [expected[number % len(expected)] for number in range(64)]
