"""Settings: what is refused, in which order, and with which words."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import subprocess
import sys
from typing import Any

import pytest

from app.config.server_args import ServerArgs
from app.errors import CacheTypeConflictError, ConfigError


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ServerArgs(**settings)
    return str(caught.value)


def test_defaults_are_accepted_and_cannot_be_changed() -> None:
    args = ServerArgs()

    assert (args.page_size, args.disaggregation_mode, args.cache_type) == (16, "null", None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.page_size = 32  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_path", None),
        ("model_path", "model\0"),
        ("hicache_storage_path", "\0"),
        ("cache_type", 3),
        ("disaggregation_mode", "both"),
        ("page_size", 0),
        ("page_size", 1025),
        ("page_size", 16.0),
        ("page_size", True),
        ("page_size", "16"),
        ("tp_size", 0),
        ("dp_size", 2),
        ("max_running_requests", 0),
        ("max_running_requests", 5000),
        ("max_total_tokens", 0),
        ("context_length", 1),
        ("chunked_prefill_size", 0),
        ("chunked_prefill_size", -2),
        ("chunked_prefill_size", -1.0),
        ("dtype", "float16"),
        ("kv_cache_dtype", "int8"),
        ("schedule_policy", "random"),
        ("random_seed", -1),
        ("random_seed", 2**32),
        ("device", "gpu"),
        ("mem_fraction_static", 0.0),
        ("mem_fraction_static", 1),
        ("warmup", "prefill"),
        ("check_invariants", 1),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("disable_overlap", None),
        ("eviction_policy", "random"),
    ],
)
def test_each_field_is_refused_by_its_flag_with_value_and_what_is_allowed(field: str, value: object) -> None:
    message = refusal(**{field: value})

    assert message.startswith(f"--{field.replace('_', '-')}={value!r} is not allowed: ")
    assert len(message.split("is not allowed: ")[1]) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1},
        {"page_size": 3, "max_total_tokens": 6},
        {"chunked_prefill_size": -1},
        {"chunked_prefill_size": 1},
        {"page_size": 16, "max_total_tokens": 47, "context_length": 32},
        {"disaggregation_mode": "prefill", "cache_type": "anything"},
        {"dtype": "bfloat16", "kv_cache_dtype": "float32", "device": "cpu", "schedule_policy": "lpm"},
    ],
)
def test_values_at_the_edge_of_what_is_allowed_are_accepted(settings: dict[str, Any]) -> None:
    args = ServerArgs(**settings)

    assert {name: getattr(args, name) for name in settings} == settings


def test_first_wrong_field_in_order_is_the_one_reported() -> None:
    assert refusal(random_seed=-1, page_size=0, dtype="x").startswith("--page-size=0 ")
    assert refusal(random_seed=-1, dtype="x").startswith("--dtype='x' ")


def test_a_wrong_field_is_reported_before_a_wrong_pair() -> None:
    assert refusal(max_total_tokens=1, page_size=16, eviction_policy="x").startswith("--eviction-policy='x' ")


def test_pool_context_and_page_size_fit_together_or_are_refused_by_both_names() -> None:
    sizes = (1, 2, 15, 16, 17, 31, 32, 33, 64)
    for page_size, pool in itertools.product(sizes, sizes):
        pool_tokens = pool // page_size * page_size
        for context in (None, 2, max(2, pool - 1), max(2, pool), pool + 1):
            settings: dict[str, Any] = {"page_size": page_size, "max_total_tokens": pool, "context_length": context}
            if pool_tokens < page_size + 1:
                assert f"--max-total-tokens={pool} cannot be combined with --page-size=" in refusal(**settings)
            elif context is not None and context > pool_tokens:
                assert f"--context-length={context} cannot be combined with --max-total-tokens=" in refusal(**settings)
            else:
                ServerArgs(**settings)


def test_context_larger_than_the_pool_names_both_flags_and_the_whole_pages() -> None:
    message = refusal(context_length=48, max_total_tokens=47)

    assert message == (
        "--context-length=48 cannot be combined with --max-total-tokens=47: "
        "2 whole pages of 16 tokens hold 32, less than one request"
    )


def test_refusals_survive_pickling_as_their_own_class() -> None:
    with pytest.raises(CacheTypeConflictError) as caught:
        ServerArgs(max_total_tokens=16)

    copy = pickle.loads(pickle.dumps(caught.value))

    assert (type(copy), str(copy)) == (CacheTypeConflictError, str(caught.value))


def test_settings_survive_pickling() -> None:
    args = ServerArgs(page_size=8, cache_type="radix_cache")

    assert pickle.loads(pickle.dumps(args)) == args


def test_config_imports_neither_jax_nor_tyro() -> None:
    code = (
        "import app.config.server_args, app.config.checks, app.config.cache_type, app.observability.logging, sys;"
        "assert not {'jax', 'jaxlib', 'tyro', 'numpy'} & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", code], check=True)
