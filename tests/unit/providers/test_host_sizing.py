"""The host pool, staging, and a KV pool that leaves them room."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AbstractMesh

from app.config.model_config import Component, LatentShape, ModelConfig, StateArray
from app.config.server_args import ServerArgs
from app.core.transfers import PageCounts
from app.errors import ConfigError
from app.models.families.table import num_parameters
from app.providers import host_sizing, hybrid, sizing
from app.providers.host_sizing import HostSize, Specs
from app.providers.tier_demand import NO_DEMAND, TierDemand
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.mesh import DATA_AXIS, TENSOR_AXIS

MODEL = ModelConfig(
    architecture="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=1024,
)
WINDOWED = replace(
    MODEL,
    components=frozenset({Component.FULL, Component.SWA}),
    sliding_window=40,
    layer_components=(frozenset({Component.FULL}), frozenset({Component.SWA})),
)
RECURRENT = replace(
    MODEL,
    components=frozenset({Component.FULL, Component.RECURRENT}),
    layer_components=(frozenset({Component.FULL}), frozenset({Component.RECURRENT})),
    recurrent_state=(StateArray(shape=(8, 8)),),
)
LATENT = replace(
    MODEL,
    head_dim=24,
    latent=LatentShape(latent_dim=16, rope_dim=8, plain_dim=8, value_dim=8, score_scale=0.25),
)
PARTLY_SHARED = replace(RECURRENT, recurrent_state=(StateArray(shape=(8, 8), sharded_axis=0), StateArray(shape=(3, 4))))
WEIGHTS = 4 * num_parameters(MODEL)
STEP = 12_345
PAGE = 16 * 2 * 2 * 2 * 16 * 4  # bytes: tokens, keys and values, layers, KV heads, head_dim, float32


def tiers(**settings: Any) -> ServerArgs:
    return ServerArgs(**{"enable_hierarchical_cache": True, **settings})


def one_of_each(args: ServerArgs, model: ModelConfig) -> Specs:
    page = sizing.page_spec(args, model, "float32")
    return Specs(page, hybrid.window_page(args, model, page), hybrid.one_snapshot(args, model))


def demand_of(args: ServerArgs, model: ModelConfig = MODEL, platform: str = "cpu") -> TierDemand:
    chunk_tokens = sizing.scheduler_limits(args, model).chunk_tokens
    attention = sizing.attention_choice(args, model, platform, "float32", "float32")
    return host_sizing.tier_demand(args, model, platform, attention, one_of_each(args, model), chunk_tokens)


def pages(args: ServerArgs, memory: int, platform: str = "cpu") -> int:
    served = sizing.served_model(args, MODEL)
    demand = demand_of(args, served, platform)
    return sizing.pool_pages(args, served, PAGE, memory, "float32", sizing.pool_room(platform), STEP, demand)


def size_of(args: ServerArgs, num_pages: int, model: ModelConfig = MODEL, platform: str = "cpu") -> HostSize:
    page, window, state = one_of_each(args, model)
    chunk_tokens = sizing.scheduler_limits(args, model).chunk_tokens
    device = Specs(
        sizing.with_pages(page, num_pages),
        hybrid.window_spec(args, model, window, num_pages, chunk_tokens),
        hybrid.state_spec(args, model, state, num_pages),
    )
    size = host_sizing.host_size(args, model, platform, device, demand_of(args, model, platform))
    assert size is not None
    return size


def test_without_the_flag_there_is_nothing_and_the_kv_pool_is_as_it_was():
    args = ServerArgs()
    assert demand_of(args) is NO_DEMAND
    device = Specs(sizing.with_pages(one_of_each(args, MODEL).pages, 100), None, None)
    assert host_sizing.host_size(args, MODEL, "cpu", device, NO_DEMAND) is None


def test_the_host_pool_is_a_multiple_of_the_kv_pool_or_has_the_size_that_was_asked_for():
    assert size_of(tiers(hicache_ratio=2.5), 100).counts == PageCounts(250)
    assert size_of(tiers(hicache_ratio=0.1), 100).counts == PageCounts(10)
    asked = size_of(tiers(hicache_size=50.5 * PAGE / 1e9, hicache_ratio=9.0), 100)
    assert asked.counts == PageCounts(50)
    assert asked.num_bytes == 50 * PAGE


def test_window_pages_are_on_the_host_in_the_same_proportion_and_enough_for_one_request():
    args = tiers(hicache_ratio=2.0)
    assert size_of(args, 1000, WINDOWED).counts == PageCounts(2000, 1000)
    kept = -(-39 // 16) + 1 + 1  # that 40 tokens see from within a page, and one half in another node
    assert size_of(tiers(hicache_ratio=0.001), 1000, WINDOWED).counts == PageCounts(1, kept)


def test_snapshots_are_on_the_host_in_the_same_proportion_and_at_least_one():
    on_device = 1000 * 16 // 256 + 16
    assert size_of(tiers(hicache_ratio=2.0), 1000, RECURRENT).counts == PageCounts(2000, 0, 2 * on_device)
    # A prefix is moved up to its snapshot in one piece: 16 pages.
    assert size_of(tiers(hicache_ratio=0.001), 1000, RECURRENT).counts == PageCounts(16, 0, 1)


@pytest.mark.parametrize("model", [MODEL, WINDOWED, RECURRENT])
@given(st.floats(1e-4, 0.1), st.integers(40, 5000))
def test_a_size_is_never_exceeded_or_it_is_refused_with_one_that_is_not(model, gigabytes, num_pages):
    outcome = size_or_refusal(tiers(hicache_size=gigabytes), num_pages, model)
    if isinstance(outcome, ConfigError):
        assert str(outcome).startswith(f"--hicache-size={gigabytes!r} is not allowed: ")
        least = float(outcome.allowed.split()[0]) + 1e-4  # shown with four digits
        assert least > gigabytes
        gigabytes = least
        outcome = size_of(tiers(hicache_size=least), num_pages, model)
    assert outcome.num_bytes <= gigabytes * 1e9


def size_or_refusal(args: ServerArgs, num_pages: int, model: ModelConfig) -> HostSize | ConfigError:
    try:
        return size_of(args, num_pages, model)
    except ConfigError as error:
        return error


def test_a_pool_of_more_pages_than_there_are_ids_is_refused():
    with pytest.raises(ConfigError, match=r"^--hicache-ratio=10000 is not allowed: less: .*ids go up to 2147483647"):
        size_of(tiers(hicache_ratio=10_000), 10**6)


# -- staging ---------------------------------------------------------------------------------------------------------


def test_staging_is_two_chunks_or_an_eighth_of_the_kv_pool_beyond_what_one_program_moves():
    chunk = 512 // 16
    assert size_of(tiers(), 100_000).limits.staging_bytes == 2 * chunk * PAGE
    assert size_of(tiers(), 80).limits.staging_bytes == (8 + 80 // 8) * PAGE
    assert size_of(tiers(chunked_prefill_size=16), 100_000).limits.staging_bytes == 8 * PAGE


def test_staging_that_was_asked_for_is_given_or_refused():
    asked = 3 * PAGE / 1e9
    assert size_of(tiers(hicache_staging_size=asked), 100).limits.staging_bytes == 3 * PAGE
    with pytest.raises(ConfigError, match=r"^--hicache-staging-size=1e-06 is not allowed: 0\.0\d+ or more"):
        demand_of(tiers(hicache_staging_size=1e-6))


@pytest.mark.parametrize("model", [MODEL, WINDOWED, RECURRENT])
def test_staging_holds_the_least_that_is_moved_in_one_piece(model):
    args = tiers(hicache_ratio=0.0001, chunked_prefill_size=1)
    size = size_of(args, 40, model)
    assert size.limits.num_bytes(size.counts) <= size.limits.staging_bytes


def test_limits_say_what_each_kind_of_page_takes():
    limits = size_of(tiers(hicache_copy_deadline=2.0), 1000, RECURRENT).limits
    assert limits.page_bytes == (PAGE // 2, 0, 8 * 8 * 4)
    assert limits.copy_deadline_s == 2.0


# -- the KV pool beside it -------------------------------------------------------------------------------------------


def taken(args: ServerArgs, num_pages: int, platform: str) -> int:
    """Bytes of the memory that the KV pool is in."""
    return WEIGHTS + STEP + (num_pages + 1) * PAGE + size_of(args, num_pages, MODEL, platform).bytes_beside_pool


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@given(
    memory=st.integers(20_000_000, 2_000_000_000),
    ratio=st.one_of(st.just(0.3), st.floats(0.1, 8)),
    staging=st.one_of(st.none(), st.just(0.001)),
)
def test_by_default_everything_fits_and_little_is_left(platform, memory, ratio, staging):
    args = tiers(hicache_ratio=ratio, mem_fraction_static=0.9, hicache_staging_size=staging)
    num_pages = pages(args, memory, platform)
    usable = int(0.9 * memory)
    assert taken(args, num_pages, platform) <= usable
    share = ratio if platform == "cpu" else 0
    assert usable - taken(args, num_pages, platform) <= 4 * (1 + share) * PAGE + num_pages  # each page is rounded up


def test_a_host_pool_of_a_given_size_is_left_room_on_cpu_alone():
    memory = 200_000_000
    plain = pages(ServerArgs(mem_fraction_static=0.9), memory)
    staging = 2 * 512 // 16
    args = tiers(mem_fraction_static=0.9, hicache_size=0.05)
    assert pages(args, memory) == pytest.approx(plain - 0.05e9 / PAGE - staging, abs=2)
    assert pages(args, memory, "tpu") == pytest.approx(plain - staging, abs=2)


def test_a_kv_pool_that_was_asked_for_and_fits_only_alone_is_refused_with_the_numbers():
    memory = 100_000_000
    asked = {"max_total_tokens": 1000 * 16}
    assert pages(ServerArgs(**asked), memory) == 1000
    with pytest.raises(ConfigError, match=r"^--hicache-ratio=20\.0 is not allowed: less: .* leave 0\.\d+ GB, of which"):
        pages(tiers(**asked, hicache_ratio=20.0), memory)
    with pytest.raises(ConfigError, match=r"^--hicache-size=1 is not allowed: less: .*its host pool 1\.000 GB"):
        pages(tiers(**asked, hicache_size=1), memory)
    with pytest.raises(ConfigError, match=r"^--hicache-staging-size=0\.095 is not allowed: less: "):
        pages(tiers(**asked, hicache_staging_size=0.095, hicache_ratio=20.0), memory, "tpu")
    with pytest.raises(ConfigError, match=r"^--max-total-tokens=1600000 is not allowed"):
        pages(tiers(max_total_tokens=1_600_000), memory)


def test_a_host_pool_that_leaves_no_room_for_one_request_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"^--hicache-ratio=100\.0 is not allowed: less: .*its host pool 0\.053 GB"):
        pages(tiers(hicache_ratio=100.0), 20_000_000)
    with pytest.raises(ConfigError, match=r"^--context-length=1024 is not allowed: memory holds 0 tokens"):
        pages(tiers(), WEIGHTS // 2)


def test_a_host_pool_in_memory_of_its_own_must_fit_the_host(mocker):
    mocker.patch.object(host_sizing, "host_memory_bytes", return_value=300 * PAGE)
    device = Specs(sizing.with_pages(one_of_each(tiers(), MODEL).pages, 100), None, None)

    def here(**settings: Any) -> HostSize | None:
        args = tiers(**settings)
        return host_sizing.host_size_here(args, MODEL, "tpu", device, demand_of(args, MODEL, "tpu"))

    fits = here()
    assert fits is not None
    assert fits.counts == PageCounts(200)
    with pytest.raises(ConfigError, match=r"^--hicache-ratio=2\.2 is not allowed: less: it makes a pool of 0\.0"):
        here(hicache_ratio=2.2)


def test_pages_of_several_ranks_are_counted_together():
    args = tiers(tp_size=4)  # two KV heads, each kept twice
    assert host_sizing.bytes_of_each(one_of_each(args, MODEL)).pages == 2 * PAGE


@pytest.mark.parametrize("model", [MODEL, WINDOWED, RECURRENT, PARTLY_SHARED, LATENT])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_a_page_takes_what_all_ranks_hold_of_it(model, tp_size):
    """Counted shard by shard, of the arrays that the pools are made of."""
    full, window, states = one_of_each(tiers(tp_size=tp_size), model)
    mesh: Any = AbstractMesh((1, tp_size), (DATA_AXIS, TENSOR_AXIS))
    kinds = HybridSpec(full=full, window=window, states=states).abstract(mesh)

    def a_page(arrays: Any) -> int:
        """All ranks' shares of one index of the first axis, which is the pages'."""
        shares = [math.prod(leaf.sharding.shard_shape(leaf.shape)[1:]) for leaf in jax.tree.leaves(arrays)]
        return tp_size * 4 * sum(shares)

    assert host_sizing.bytes_of_each(Specs(full, window, states)) == tuple(a_page(arrays) for arrays in kinds)


def test_latents_of_several_ranks_take_more_memory_on_device_and_host_and_no_more_storage():
    one, four = (one_of_each(tiers(tp_size=ranks), LATENT).pages for ranks in (1, 4))
    assert (one.held_bytes, four.held_bytes) == (one.page_bytes, 4 * one.page_bytes)
    assert four.page_bytes == one.page_bytes
    sizes = [size_of(tiers(tp_size=ranks, hicache_size=40.5 * four.held_bytes / 1e9), 1000, LATENT) for ranks in (1, 4)]
    assert [size.counts.pages for size in sizes] == [162, 40]
    demand = demand_of(tiers(tp_size=4), LATENT)
    room = 1000 * four.held_bytes
    assert hybrid.bytes_a_page(tiers(tp_size=4), LATENT, four, None, None) == four.held_bytes
    assert demand.fitting_pages(room, four.held_bytes) < 1000 / (1 + tiers().hicache_ratio)


def test_pages_that_a_tpu_cannot_copy_alone_are_refused_before_anything_is_sized():
    served_by_kernel = replace(MODEL, head_dim=128, num_kv_heads=4)
    with pytest.raises(ConfigError, match=r"^--page-size=1 is not allowed: 2 or more with --enable-hierarchical-cache"):
        demand_of(tiers(page_size=1), MODEL, "tpu")
    for allowed in (
        demand_of(tiers(page_size=2), MODEL, "tpu"),
        demand_of(tiers(page_size=1), served_by_kernel, "tpu"),
        demand_of(tiers(page_size=1), LATENT, "tpu"),
        demand_of(tiers(page_size=1), MODEL, "cpu"),
    ):
        assert allowed.staging_bytes > 0
    assert demand_of(ServerArgs(page_size=1), MODEL, "tpu") is NO_DEMAND
