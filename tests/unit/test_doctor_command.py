"""`doctor` on the real container with the bundled model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.commands import doctor
from app.commands.doctor import DoctorArgs
from app.config.server_args import ServerArgs
from app.containers import Container
from app.errors import ConfigError
from app.providers.testing import overridden


@pytest.mark.model
def test_doctor_builds_every_provider_and_says_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ServerArgs(
        device="cpu", page_size=8, max_total_tokens=1003, max_running_requests=5, chunked_prefill_size=40
    )

    assert doctor.run(DoctorArgs(json=True, server=settings)) == 0

    report = json.loads(capsys.readouterr().out)
    assert report["cache_type"] == "unified_radix_cache"
    assert "covers a model with full" in report["cache_type_reason"]
    assert (report["page_size"], report["pool_pages"], report["pool_tokens"]) == (8, 125, 1000)
    assert report["pool_bytes"] == 126 * 2 * 30 * 8 * 3 * 64 * 4  # pages, K and V, layers, tokens, heads, width, bytes
    assert report["buckets_rows"] == [2, 4, 8]
    assert report["buckets_chunk_tokens"] == [16, 32, 64]
    assert {"tree_cache", "device_pool", "runtime", "scheduler", "tokenizer"} <= set(report["providers"])
    assert {"tree_cache", "token_allocator", "req_to_token_pool", "scheduler"} <= set(report["checked"])
    assert report["warnings"] == ["the pool holds 1000 tokens and the context is 8192: longer requests are refused"]


def test_doctor_shows_the_same_as_text() -> None:
    shown = doctor.as_text({"pool_pages": 1024, "warnings": [], "checked": ["tree_cache", "scheduler"]})

    assert shown.splitlines() == [
        "pool pages              1,024",
        "warnings                none",
        "checked                 tree_cache, scheduler",
        "all is well",
    ]


@pytest.mark.model
def test_doctor_refuses_a_tpu_that_the_compiler_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"--target='v99:2x2' is not allowed"):
        doctor.run(DoctorArgs(target="v99:2x2", server=ServerArgs(device="cpu")))


@contextlib.contextmanager
def fake_engine(args: ServerArgs, prepare: Callable[[Container], object]) -> Iterator[Container]:
    with overridden(args, fake=True, checkpoint=lambda container: container.base_model_config) as container:
        prepare(container)
        yield container


def examined(capsys: pytest.CaptureFixture[str], prefill_rate: float | None = None, **settings: Any) -> dict[str, Any]:
    server = ServerArgs(page_size=4, max_total_tokens=256, **settings)
    assert doctor.run(DoctorArgs(json=True, prefill_rate=prefill_rate, server=server), fake_engine) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_doctor_shows_the_tiers_and_how_fast_copies_are(capsys: pytest.CaptureFixture[str]) -> None:
    report = examined(capsys, enable_hierarchical_cache=True, hicache_storage_backend="memory", prefill_rate=1e-9)

    assert (report["host_tier"], report["host_write_policy"]) == ("cache", "write_through_selective")
    assert (report["host_pool_pages"], report["host_pool_tokens"], report["host_pool_bytes"]) == (128, 512, 128 * 32)
    assert report["host_staging_bytes"] > 0
    assert (report["storage"], report["storage_is"], report["storage_values"]) == ("memory", [], 0)
    assert report["copied_to_host"].endswith(" GB a second, in 0 MB")
    assert report["restored_tokens_per_s"] > 0
    assert not [text for text in report["warnings"] if "host" in text]


def test_doctor_warns_of_a_host_pool_that_adds_nothing_and_of_copies_that_do_not_pay(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = examined(capsys, enable_hierarchical_cache=True, hicache_ratio=1.0, prefill_rate=1e15)

    assert (
        len([text for text in report["warnings"] if "the host pool holds 256 tokens and the KV pool 256" in text]) == 1
    )
    assert (
        len([text for text in report["warnings"] if "computing is quicker, and nothing will be restored" in text]) == 1
    )


def test_doctor_measures_nothing_without_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    report = examined(capsys, prefill_rate=1e15)

    assert report["host_tier"] == "none"
    assert "copied_to_host" not in report
    assert not [text for text in report["warnings"] if "restored" in text]
