"""Measuring copies between device and host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from app.config.server_args import ServerArgs
from app.hicache import copy_rates
from app.hicache.copy_rates import measure_copies
from app.providers.testing import overridden
from app.tpu.cpu_fake import fake_model_config
from tests.support.compiling import compiled_programs
from tests.support.tier_rig import opened_tiers
from tests.support.tiny_llama import files_of, tiny_llama


@pytest.mark.parametrize("fake", [True, False])
def test_it_moves_what_is_there_and_leaves_it_as_it_was(fake: bool, mocker: Any) -> None:
    args = ServerArgs(page_size=4, max_total_tokens=64, enable_hierarchical_cache=True)
    files = {} if fake else files_of(tiny_llama())
    with overridden(args, fake=fake, **files) as container:
        container.runtime()
        pool, carrier = container.device_pool(), container.page_carriers().pages
        patterns = jax.tree.map(_pattern, pool.take())
        pool.put(patterns)
        expected = jax.tree.map(np.array, patterns)
        mocker.patch.object(copy_rates, "MOST_BYTES", 5 * carrier.page_bytes)

        rates = measure_copies(pool, carrier, num_pages=16)

        assert rates is not None
        assert rates.num_bytes == 5 * carrier.page_bytes
        assert min(rates.to_host, rates.to_device) > 0
        now = pool.take()
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, now), expected)


def _pattern(array: jax.Array) -> jax.Array:
    return jax.device_put(np.arange(array.size).reshape(array.shape).astype(array.dtype), array.sharding)


def test_a_pool_of_fewer_pages_is_moved_whole() -> None:
    args = ServerArgs(page_size=4, max_total_tokens=8, enable_hierarchical_cache=True)
    with overridden(args, fake=True, model=fake_model_config()) as container:
        container.runtime()
        carrier = container.page_carriers().pages
        rates = measure_copies(container.device_pool(), carrier, num_pages=2)
    assert rates is not None
    assert rates.num_bytes == 2 * carrier.page_bytes


@pytest.mark.parametrize("hybrid", [False, True])
def test_after_warming_up_no_transfer_compiles_anything_and_nothing_is_changed(hybrid: bool) -> None:
    more = {"max_recurrent_snapshots": 24} if hybrid else {}
    with opened_tiers(hybrid_model=hybrid, **more) as rig:
        counts = (9, 9, 9) if hybrid else (9, 0, 0)  # a group of each size
        source = rig.allocate(*counts)
        rig.fill(source, 1)
        free = rig.free_counts()

        list(rig.runtime.warm_up("copies", 16))

        assert rig.device_values(source) == [list(range(1, 1 + count)) for count in counts]
        assert rig.free_counts() == free
        rig.check()
        rig.move(wait_s=0.001)  # a step without rows may compile something of its own
        with compiled_programs() as compiled:
            host = rig.backed_up(source)
            restore = rig.restore(host)
            prepared, _ = rig.move(restores=(restore,))
            rig.until(restore.number)
        assert compiled == []
        assert rig.device_values(prepared.transfers.restores[0]) == [list(range(1, 1 + count)) for count in counts]
        assert not rig.ended[restore.number].has_compiled


def test_a_restore_for_which_something_is_compiled_says_so() -> None:
    with opened_tiers() as rig:
        source = rig.allocate(1)
        rig.fill(source, 1)
        host = rig.backed_up(source)
        first, second = rig.restore(host), rig.restore(host)
        for restore in (first, second):
            rig.move(restores=(restore,))
            rig.until(restore.number)

        assert (rig.ended[first.number].has_compiled, rig.ended[second.number].has_compiled) == (True, False)


def test_a_pool_that_fails_in_warming_up_is_made_anew(mocker: Any) -> None:
    with opened_tiers(broken_scatters=1) as rig:
        before = rig.runtime.identity
        with pytest.raises(RuntimeError, match="injected"):
            list(rig.runtime.warm_up("copies", 16))
        assert rig.runtime.identity != before
        rig.check()

        list(rig.runtime.warm_up("copies", 16))

        assert rig.runtime.restored_bytes_per_s()


def test_nothing_is_compiled_for_none() -> None:
    with opened_tiers() as rig:
        assert list(rig.runtime.warm_up("none", 16)) == []
        assert rig.runtime.restored_bytes_per_s() is None
