"""Measuring copies between device and host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from app.config.server_args import ServerArgs
from app.providers import copy_rates
from app.providers.copy_rates import measure_copies
from app.providers.testing import overridden
from app.tpu.cpu_fake import fake_model_config
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
