"""`doctor` on the real container with the bundled model."""

from __future__ import annotations

import json

import pytest

from app.commands import doctor
from app.commands.doctor import DoctorArgs
from app.config.server_args import ServerArgs
from app.errors import ConfigError


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
