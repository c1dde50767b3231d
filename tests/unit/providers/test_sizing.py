"""Pool and limits from settings, model and memory."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.errors import ConfigError
from app.models.families.table import num_parameters
from app.providers import sizing

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
WEIGHTS = 4 * num_parameters(MODEL)
TOKEN = 2 * 2 * 2 * 16 * 4  # bytes: keys and values, layers, KV heads, head_dim, float32


STEP = 12_345  # bytes


def pages(args: ServerArgs, memory: int, platform: str = "cpu") -> int:
    served = sizing.served_model(args, MODEL)
    page = sizing.page_spec(args, served, "float32")
    return sizing.pool_pages(args, served, page.page_bytes, memory, "float32", sizing.pool_room(platform), STEP)


def needed(num_pages: int) -> int:
    """Bytes of weights, a step and a pool with its padding page."""
    return WEIGHTS + STEP + (num_pages + 1) * 16 * TOKEN


def test_a_pool_that_was_asked_for_is_given_when_it_fits():
    args = ServerArgs(max_total_tokens=1000)
    assert pages(args, needed(62)) == 62
    with pytest.raises(ConfigError, match=r"--max-total-tokens=1000 is not allowed: at most 976"):
        pages(args, needed(62) - 1)


@pytest.mark.parametrize(("platform", "fraction"), [("cpu", 0.7), ("tpu", 0.9)])
def test_by_default_weights_pool_and_a_step_take_a_part_of_the_memory(platform: str, fraction: float):
    memory = int(needed(100) / fraction) + 1
    assert pages(ServerArgs(), memory, platform) == 100
    assert pages(ServerArgs(), memory - 16 * TOKEN, platform) == 99


def test_on_cpu_nobody_gets_more_than_two_of_the_longest_requests_unasked():
    assert pages(ServerArgs(), 10**12) == 2 * 1024 // 16
    assert pages(ServerArgs(mem_fraction_static=0.5), 10**9) == pages(ServerArgs(), 10**9 * 5 // 9, "tpu")


def test_the_part_that_is_asked_for_bounds_a_pool_that_is_asked_for():
    args = ServerArgs(max_total_tokens=1000, mem_fraction_static=0.5)
    assert pages(args, 2 * needed(62)) == 62
    with pytest.raises(ConfigError, match=r"--max-total-tokens=1000 is not allowed: at most 976"):
        pages(args, 2 * needed(62) - 2)


def test_memory_that_serves_no_request_of_full_length_is_refused():
    with pytest.raises(ConfigError, match=r"--context-length=1024 is not allowed: memory holds 160 tokens"):
        pages(ServerArgs(mem_fraction_static=0.5), 2 * needed(10))
    with pytest.raises(ConfigError, match="memory holds 0 tokens"):
        pages(ServerArgs(), WEIGHTS // 2)


def test_the_served_context_is_what_was_asked_for_or_what_the_pool_holds():
    assert sizing.served_model(ServerArgs(), MODEL).context_length == 1024
    assert sizing.served_model(ServerArgs(context_length=100), MODEL).context_length == 100
    assert sizing.served_model(ServerArgs(max_total_tokens=330), MODEL).context_length == 320
    with pytest.raises(ConfigError, match="--context-length=2048"):
        sizing.served_model(ServerArgs(context_length=2048), MODEL)


@pytest.mark.parametrize(
    ("platform", "dtype", "kv", "computed", "stored"),
    [
        ("cpu", "auto", "auto", "float32", "float32"),
        ("cpu", "auto", "bfloat16", "float32", "bfloat16_bits"),
        ("cpu", "bfloat16", "auto", "bfloat16", "bfloat16_bits"),
        ("tpu", "auto", "auto", "bfloat16", "bfloat16"),
        ("tpu", "bfloat16", "float32", "bfloat16", "float32"),
    ],
)
def test_types_by_platform(platform, dtype, kv, computed, stored):
    args = ServerArgs(dtype=dtype, kv_cache_dtype=kv)
    assert sizing.computation_dtype(args, platform) == computed
    assert sizing.pool_dtype(args, platform, computed) == stored


def test_kv_heads_fewer_than_ranks_are_counted_for_each_rank():
    args = ServerArgs(tp_size=4)
    assert sizing.page_spec(args, MODEL, "float32").num_kv_heads == 4


def test_chunking_off_takes_whole_prompts():
    args = ServerArgs(chunked_prefill_size=-1, disable_overlap=True)
    limits = sizing.scheduler_limits(args, MODEL)
    assert limits.chunk_tokens == MODEL.context_length
    assert not limits.overlap


def test_memory_is_the_machines_or_the_cgroups(tmp_path, mocker):
    machine = sizing.host_memory_bytes()
    limit = tmp_path / "memory.max"
    mocker.patch.object(sizing, "_CGROUP_LIMITS", (limit,))
    assert sizing.host_memory_bytes() >= machine
    limit.write_text("max\n")
    assert sizing.host_memory_bytes() >= machine
    limit.write_text("12345\n")
    assert sizing.host_memory_bytes() == 12345


def test_with_pages_changes_the_count_alone():
    page = sizing.page_spec(ServerArgs(), MODEL, "float32")
    assert sizing.with_pages(page, 7) == replace(page, num_pages=7)
    assert sizing.pages_of_context(MODEL, 100) == 11
