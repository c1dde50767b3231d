"""Settings of the tiers below the device: what is accepted, what needs what, and with which words it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from app.config.server_args import ServerArgs
from app.errors import CacheTypeConflictError, ConfigError

TIERS: dict[str, Any] = {"enable_hierarchical_cache": True}
STORAGE: dict[str, Any] = {**TIERS, "hicache_storage_backend": "file", "hicache_storage_path": "/tmp/pages"}
# One value of each that is not its default.
CHANGED: dict[str, Any] = {
    "hicache_ratio": 3.0,
    "hicache_size": 1,
    "hicache_write_policy": "write_back",
    "hicache_write_min_hits": 3,
    "hicache_host_mode": "buffer_only",
    "hicache_staging_size": 0.5,
    "hicache_copy_deadline": 1.0,
    "hicache_storage_backend": "file",
    "hicache_storage_path": "/tmp/pages",
    "hicache_storage_size": 2.5,
    "hicache_storage_options": '{"region": "eu"}',
    "hicache_storage_prefetch_policy": "wait_complete",
    "hicache_storage_prefetch_timeout": 1.5,
    "hicache_storage_deadline": 5.0,
}


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ServerArgs(**settings)
    return str(caught.value)


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def test_every_setting_of_the_tiers_is_looked_at_here() -> None:
    assert set(CHANGED) == {name for name in ServerArgs.__dataclass_fields__ if name.startswith("hicache_")}


@pytest.mark.parametrize("field", CHANGED)
def test_a_setting_of_tiers_that_are_off_is_refused_by_both_names(field: str) -> None:
    message = refusal(**{field: CHANGED[field]})

    assert message.startswith(f"{flag(field)}=")
    assert "cannot be combined with --enable-hierarchical-cache=False: there are no tiers without" in message


@pytest.mark.parametrize("field", [name for name in CHANGED if name.startswith("hicache_storage_")][1:])
def test_a_setting_of_a_storage_that_nobody_named_is_refused_by_both_names(field: str) -> None:
    message = refusal(**TIERS, **{field: CHANGED[field]})

    assert message.startswith(f"{flag(field)}=")
    assert message.endswith("--hicache-storage-backend=None: name the backend that it is for")


@pytest.mark.parametrize("field", CHANGED)
def test_with_tiers_and_a_storage_each_is_accepted(field: str) -> None:
    args = ServerArgs(**{**STORAGE, field: CHANGED[field]})

    assert getattr(args, field) == CHANGED[field]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {**TIERS, "hicache_host_mode": "buffer_only"},
            "--hicache-host-mode='buffer_only' cannot be combined with --hicache-storage-backend=None",
        ),
        (
            {**TIERS, "hicache_write_policy": "write_back", "hicache_write_min_hits": 3},
            "--hicache-write-min-hits=3 cannot be combined with --hicache-write-policy='write_back'",
        ),
        (
            {
                **STORAGE,
                "hicache_storage_prefetch_policy": "best_effort",
                "hicache_storage_prefetch_timeout": 1.0,
            },
            "--hicache-storage-prefetch-timeout=1.0 cannot be combined with "
            "--hicache-storage-prefetch-policy='best_effort'",
        ),
        (
            {**TIERS, "nnodes": 2, "tp_size": 2, "max_total_tokens": 64, "dist_init_addr": "10.0.0.1:5000"},
            "--enable-hierarchical-cache=True cannot be combined with --nnodes=2",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_by_both_names(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(CacheTypeConflictError) as caught:
        ServerArgs(**settings)

    assert str(caught.value).startswith(words)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("enable_hierarchical_cache", 1),
        ("hicache_ratio", 0),
        ("hicache_ratio", True),
        ("hicache_ratio", float("nan")),
        ("hicache_ratio", 1e5),
        ("hicache_size", 0.0),
        ("hicache_size", "4"),
        ("hicache_size", float("inf")),
        ("hicache_write_policy", "write_sometimes"),
        ("hicache_write_min_hits", 0),
        ("hicache_host_mode", "disk"),
        ("hicache_staging_size", -1.0),
        ("hicache_copy_deadline", 0),
        ("hicache_storage_backend", 3),
        ("hicache_storage_path", None),
        ("hicache_storage_size", 0),
        ("hicache_storage_prefetch_policy", "never"),
        ("hicache_storage_prefetch_timeout", 0.0),
        ("hicache_storage_deadline", None),
    ],
)
def test_a_wrong_value_is_refused_by_its_flag(field: str, value: object) -> None:
    message = refusal(**{**STORAGE, field: value})

    assert message.startswith(f"{flag(field)}={value!r} is not allowed: ")


@pytest.mark.parametrize("options", ["region=eu", "[]", '{"a": 1}', "{", '"text"'])
def test_options_that_are_no_object_of_texts_are_refused_without_being_shown(options: str) -> None:
    message = refusal(**STORAGE, hicache_storage_options=options)

    assert message.startswith("--hicache-storage-options='***' is not allowed: a JSON object of texts")


def test_options_may_hold_keys_and_are_never_shown() -> None:
    options = '{"aws_secret_access_key": "hush"}'

    assert "hush" not in repr(ServerArgs(**STORAGE, hicache_storage_options=options))
    assert "hush" not in refusal(hicache_storage_options=options)
    assert "hush" not in refusal(**TIERS, hicache_storage_options=options)
