"""What tells the KV of one engine from that of others."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.config.model_config import Component, ModelConfig, StateArray
from app.core.keys import DEFAULT_NAMESPACE
from app.core.ports import PoolSpec, StateSpec
from app.core.transfers import OfEachPool
from app.hicache.identities import FAKE_WEIGHTS, Identities, model_digest, random_weights_digest, storage_identities
from app.tpu.cpu_fake import fake_model_config

ROOT = Path(__file__).parents[3]
MODEL = replace(fake_model_config(window=8, recurrent=True), num_kv_heads=4, head_dim=16)
PAGES = PoolSpec(num_pages=10, page_size=16, num_layers=1, num_kv_heads=4, head_dim=16, dtype="float32")
STATES = StateSpec(num_snapshots=4, num_rows=2, num_layers=1, arrays=(StateArray(shape=(3,)),))
STACKED = [SimpleNamespace(dtype="float32", shape=(2, 16, 64))]
FLAT = [SimpleNamespace(dtype="float32", shape=(1, 16, 128))]
SLOT = [SimpleNamespace(dtype="float32", shape=(1, 3))]
FACTS: dict[str, Any] = {
    "weights_digest": "w" * 64,
    "model": MODEL,
    "computed_dtype": "float32",
    "tp_size": 1,
    "pages": PAGES,
    "window_pages": PAGES,
    "states": STATES,
    "forms": OfEachPool(STACKED, STACKED, SLOT),
}


def identities(**changed: object) -> Identities:
    return storage_identities(**{**FACTS, **changed})


def test_each_kind_has_an_identity_of_its_own_though_their_pages_look_alike() -> None:
    mine = identities()

    assert len({each.digest() for each in mine if each is not None}) == 3
    assert mine == identities()


def test_a_kind_that_the_model_lacks_has_none() -> None:
    mine = identities(window_pages=None, states=None, forms=OfEachPool(STACKED, None, None))

    assert mine.pages == identities().pages
    assert mine.window_pages is mine.states is None


@pytest.mark.parametrize(
    "changed",
    [
        {"weights_digest": "v" * 64},
        {"model": replace(MODEL, rope_theta=20_000.0)},
        {"model": replace(MODEL, sliding_window=9)},
        {"computed_dtype": "bfloat16"},
        {"tp_size": 2},
        {"pages": replace(PAGES, page_size=32), "window_pages": replace(PAGES, page_size=32)},
        {"pages": replace(PAGES, dtype="bfloat16"), "window_pages": replace(PAGES, dtype="bfloat16")},
        {"forms": OfEachPool(FLAT, FLAT, [*SLOT, *SLOT])},
    ],
    ids=["weights", "rope", "window", "computation", "tp", "page size", "stored type", "layout"],
)
def test_whatever_changes_the_bytes_changes_every_key(changed: dict[str, object]) -> None:
    mine, other = identities(), identities(**changed)

    assert mine.pages is not None
    assert other.pages is not None
    assert mine.pages.seed(DEFAULT_NAMESPACE) != other.pages.seed(DEFAULT_NAMESPACE)
    for one, another in list(zip(mine, other, strict=True))[:2]:
        assert one is not None
        assert another is not None
        assert one.digest() != another.digest()


@pytest.mark.parametrize(
    "changed",
    [{"pages": replace(PAGES, num_pages=99)}, {"model": replace(MODEL, context_length=7, eos_token_ids=(1,))}],
)
def test_the_size_of_the_pool_and_the_limits_of_a_server_change_nothing(changed: dict[str, object]) -> None:
    assert identities(**changed) == identities()


def test_the_digest_of_a_model_is_the_same_in_every_process() -> None:
    """Its sets are written in an order that does not depend on the process's hashes."""
    script = (
        "from app.tpu.cpu_fake import fake_model_config; from app.hicache.identities import model_digest; "
        "print(model_digest(fake_model_config(window=8, recurrent=True)))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout.strip()
        for seed in ("1", "2")
    }

    assert told == {model_digest(fake_model_config(window=8, recurrent=True))}


def test_components_are_part_of_a_model() -> None:
    full = ModelConfig(
        architecture="llama",
        vocab_size=1,
        hidden_size=1,
        intermediate_size=1,
        num_layers=2,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        context_length=1,
    )
    windowed = replace(full, components=frozenset({Component.FULL, Component.SWA}), sliding_window=4)

    assert model_digest(full) != model_digest(windowed)


def test_random_and_fake_weights_have_names_too() -> None:
    names = [random_weights_digest(0), random_weights_digest(1), FAKE_WEIGHTS, "w" * 64]

    assert len({identities(weights_digest=name).pages for name in names}) == 4
