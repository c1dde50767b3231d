"""The selection table, row by row."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from app.config.cache_type import CacheTypeChoice, check_combination, resolve_cache_type
from app.config.model_config import Component, ModelConfig
from app.config.server_args import ServerArgs
from app.errors import CacheTypeConflictError, ConfigError, UnknownCacheTypeError

FULL = frozenset({Component.FULL})
WINDOW = frozenset({Component.FULL, Component.SWA})
RECURRENT = frozenset({Component.FULL, Component.RECURRENT})
EVERYTHING = frozenset({FULL, WINDOW, RECURRENT})

# What a release without the unified cache registers, and what one with it will.
NOW = {"chunk_cache": EVERYTHING, "radix_cache": frozenset({FULL})}
LATER = {**NOW, "unified_radix_cache": EVERYTHING}

BASE = ModelConfig(
    architecture="llama",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_length=512,
)
MODELS = {
    "full": BASE,
    "window": dataclasses.replace(BASE, sliding_window=64, components=WINDOW),
    "recurrent": dataclasses.replace(BASE, components=RECURRENT),
}


def choose(model: str, table: dict[str, Any], **settings: Any) -> CacheTypeChoice:
    return resolve_cache_type(ServerArgs(**settings), MODELS[model], table)


@pytest.mark.parametrize("mode", ["null", "prefill"])
@pytest.mark.parametrize(
    ("model", "table", "expected"),
    [
        ("full", NOW, "radix_cache"),
        ("window", NOW, "chunk_cache"),
        ("recurrent", NOW, "chunk_cache"),
        ("full", LATER, "unified_radix_cache"),
        ("window", LATER, "unified_radix_cache"),
        ("recurrent", LATER, "unified_radix_cache"),
        ("window", {**NOW, "unified_radix_cache": frozenset({FULL, WINDOW})}, "unified_radix_cache"),
        ("recurrent", {**NOW, "unified_radix_cache": frozenset({FULL, WINDOW})}, "chunk_cache"),
    ],
)
def test_default_is_the_first_type_that_covers_the_model(
    mode: str, model: str, table: dict[str, Any], expected: str
) -> None:
    assert choose(model, table, disaggregation_mode=mode).name == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("table", [NOW, LATER])
@pytest.mark.parametrize("cache_type", [None, "chunk_cache"])
def test_decode_node_uses_chunk_cache_for_every_model(
    model: str, table: dict[str, Any], cache_type: str | None
) -> None:
    assert choose(model, table, disaggregation_mode="decode", cache_type=cache_type).name == "chunk_cache"


@pytest.mark.parametrize("cache_type", ["radix_cache", "unified_radix_cache", "from_outside", "never_registered"])
def test_decode_node_with_another_type_is_refused_naming_both_flags_without_a_model(cache_type: str) -> None:
    args = ServerArgs(disaggregation_mode="decode", cache_type=cache_type)

    with pytest.raises(CacheTypeConflictError) as caught:
        check_combination(args, {*LATER, "from_outside"})

    assert str(caught.value) == (
        f"--cache-type='{cache_type}' cannot be combined with --disaggregation-mode='decode': "
        "a decode node gets its prefixes from a prefill node and uses chunk_cache"
    )


@pytest.mark.parametrize("mode", ["null", "prefill"])
@pytest.mark.parametrize(
    ("model", "cache_type"),
    [(model, name) for model in MODELS for name in ("chunk_cache", "unified_radix_cache")] + [("full", "radix_cache")],
)
def test_an_explicit_type_that_covers_the_model_wins(mode: str, model: str, cache_type: str) -> None:
    chosen = choose(model, LATER, disaggregation_mode=mode, cache_type=cache_type)

    assert chosen == (cache_type, "asked for by --cache-type")


@pytest.mark.parametrize("mode", ["null", "prefill"])
@pytest.mark.parametrize(("model", "missing"), [("window", "swa"), ("recurrent", "recurrent")])
def test_an_explicit_type_without_a_component_is_refused_naming_it(mode: str, model: str, missing: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(model, LATER, disaggregation_mode=mode, cache_type="radix_cache")

    assert str(caught.value) == (
        f"--cache-type='radix_cache' is not allowed: the model needs full + {missing} and it has no {missing} component"
    )


def test_a_type_that_holds_only_more_than_the_model_has_is_refused_too() -> None:
    with pytest.raises(ConfigError, match=r"needs full and it holds full \+ swa together only"):
        choose("full", {**NOW, "windows_only": frozenset({WINDOW})}, cache_type="windows_only")


@pytest.mark.parametrize("mode", ["null", "prefill"])
def test_an_unknown_type_is_refused_with_the_known_names(mode: str) -> None:
    with pytest.raises(UnknownCacheTypeError) as caught:
        choose("full", NOW, disaggregation_mode=mode, cache_type="radix")

    assert str(caught.value) == ("--cache-type='radix' is not allowed: known cache types are chunk_cache, radix_cache")


def test_decode_without_a_registered_chunk_cache_is_refused() -> None:
    with pytest.raises(UnknownCacheTypeError, match="known cache types are radix_cache"):
        choose("full", {"radix_cache": frozenset({FULL})}, disaggregation_mode="decode")


@pytest.mark.parametrize("model", MODELS)
def test_an_outside_type_is_never_a_default_and_can_be_asked_for(model: str) -> None:
    table = {"from_outside": EVERYTHING, **NOW}

    assert choose(model, table).name != "from_outside"
    assert choose(model, table, cache_type="from_outside").name == "from_outside"


def test_a_model_that_no_default_covers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is registered for a model with full \+ swa"):
        choose("window", {"radix_cache": frozenset({FULL}), "from_outside": EVERYTHING})


def test_order_of_registration_does_not_change_the_default() -> None:
    assert choose("full", dict(reversed(LATER.items()))) == choose("full", LATER)


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("full", {}, "first of unified_radix_cache, radix_cache, chunk_cache that covers a model with full"),
        ("window", {}, "no registered cache type reuses prefixes of a model with full + swa"),
        ("full", {"disaggregation_mode": "decode"}, "the prefix was computed on a prefill node"),
        ("full", {"cache_type": "chunk_cache"}, "asked for by --cache-type"),
    ],
)
def test_the_reason_is_told_in_words(model: str, settings: dict[str, Any], words: str) -> None:
    assert words in choose(model, NOW, **settings).reason


@pytest.mark.parametrize("mode", ["null", "prefill"])
@pytest.mark.parametrize("cache_type", [None, "unified_radix_cache"])
@pytest.mark.parametrize("model", MODELS)
def test_with_tiers_every_model_gets_the_cache_that_has_them(mode: str, cache_type: str | None, model: str) -> None:
    chosen = choose(model, LATER, enable_hierarchical_cache=True, cache_type=cache_type, disaggregation_mode=mode)

    assert chosen.name == "unified_radix_cache"


@pytest.mark.parametrize("cache_type", ["chunk_cache", "radix_cache", "from_outside", "never_registered"])
def test_tiers_below_another_type_are_refused_by_both_flags_without_a_model(cache_type: str) -> None:
    args = ServerArgs(enable_hierarchical_cache=True, cache_type=cache_type)

    with pytest.raises(CacheTypeConflictError) as caught:
        check_combination(args, {*LATER, "from_outside"})

    assert str(caught.value) == (
        f"--cache-type='{cache_type}' cannot be combined with --enable-hierarchical-cache=True: "
        "unified_radix_cache has tiers below the device, and that type has none"
    )


def test_tiers_on_a_decode_node_are_refused_by_both_flags() -> None:
    args = ServerArgs(enable_hierarchical_cache=True, disaggregation_mode="decode")

    with pytest.raises(CacheTypeConflictError) as caught:
        check_combination(args, LATER)

    assert str(caught.value) == (
        "--disaggregation-mode='decode' cannot be combined with --enable-hierarchical-cache=True: "
        "unified_radix_cache has tiers below the device, and chunk_cache has none"
    )


def test_tiers_never_fall_back_to_a_type_without_them() -> None:
    with pytest.raises(UnknownCacheTypeError, match="unified_radix_cache"):
        choose("full", NOW, enable_hierarchical_cache=True)
    narrow = {**NOW, "unified_radix_cache": frozenset({FULL})}
    with pytest.raises(ConfigError, match=r"--cache-type='unified_radix_cache' .* it has no swa component"):
        choose("window", narrow, enable_hierarchical_cache=True)
