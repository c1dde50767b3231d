"""The registry of cache types, and where types come from."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest
from pytest_mock import MockerFixture
from structlog.testing import capture_logs

from app.caches import builtin
from app.caches.chunk_cache import ChunkCache
from app.caches.registry import CacheTypeRegistry, default_registry, register_kv_cache
from app.config.model_config import Component
from app.errors import ConfigError, RegistrationError, UnknownCacheTypeError

FULL = frozenset({Component.FULL})
WINDOW = frozenset({Component.FULL, Component.SWA})


@pytest.fixture
def registry() -> CacheTypeRegistry:
    registry = CacheTypeRegistry()
    register_kv_cache("mine", ChunkCache, components=[FULL], registry=registry)
    return registry


def test_builtin_types_register_when_their_modules_are_imported() -> None:
    # when
    builtin.load_builtin_caches()
    builtin.load_builtin_caches()

    # then
    table = default_registry.seal().components_by_type()
    assert table["radix_cache"] == {FULL}
    assert table["chunk_cache"] >= {FULL, WINDOW, frozenset({Component.SWA}), frozenset(Component)}
    assert all(each.builtin for each in default_registry.seal())


def test_a_registered_type_is_found_with_what_was_said_of_it(registry: CacheTypeRegistry) -> None:
    # when
    register_kv_cache("other", ChunkCache, components=(each for each in (FULL, WINDOW)), registry=registry)
    sealed = registry.seal()

    # then
    assert sealed.names() == ("mine", "other")
    assert list(sealed.components_by_type().items()) == [("mine", {FULL}), ("other", {FULL, WINDOW})]
    assert sealed.get("other").ctor is ChunkCache
    assert not sealed.get("other").builtin
    assert len(sealed) == 2


def test_a_name_is_registered_once(registry: CacheTypeRegistry) -> None:
    with pytest.raises(RegistrationError, match=r"'mine': already registered.*known cache types are mine"):
        register_kv_cache("mine", ChunkCache, components=[FULL], registry=registry)


def test_an_outside_type_cannot_take_a_name_that_may_be_chosen_unasked(registry: CacheTypeRegistry) -> None:
    with pytest.raises(RegistrationError, match="kept for a built-in type"):
        register_kv_cache("unified_radix_cache", ChunkCache, components=[FULL], registry=registry)
    assert registry.names() == ("mine",)


def test_an_unknown_name_is_answered_with_the_known_ones(registry: CacheTypeRegistry) -> None:
    with pytest.raises(UnknownCacheTypeError, match="'typo' is not allowed: known cache types are mine"):
        registry.seal().get("typo")


def test_sealing_keeps_what_was_there_and_tells_too_late_from_unknown(registry: CacheTypeRegistry) -> None:
    # given
    sealed = registry.seal()

    # when
    register_kv_cache("late", ChunkCache, components=[FULL], registry=registry)

    # then
    assert sealed.names() == ("mine",)
    assert "late" not in sealed
    with pytest.raises(RegistrationError, match=r"'late': it was registered after.*known cache types are mine"):
        sealed.get("late")
    assert registry.seal().get("late").name == "late"


def test_a_sealed_registry_takes_nothing_more(registry: CacheTypeRegistry) -> None:
    sealed = registry.seal()
    with pytest.raises(RegistrationError, match="sealed"):
        sealed.register("late", ChunkCache, components=[FULL])
    assert "late" not in sealed


def entry_points(*targets: tuple[str, str]) -> EntryPoints:
    return EntryPoints(EntryPoint(name, target, builtin.ENTRY_POINT_GROUP) for name, target in targets)


def test_a_broken_plugin_that_nobody_asked_for_is_a_warning(mocker: MockerFixture) -> None:
    # given a plugin that cannot be imported, and one that can
    found = entry_points(("broken", "no_such_module_anywhere"), ("good", "app.caches.chunk_cache"))
    mocker.patch.object(builtin, "entry_points", return_value=found)

    # when
    with capture_logs() as logs:
        builtin.load_entry_points(wanted="radix_cache")

    # then
    assert [(entry["event"], entry["name"], entry["log_level"]) for entry in logs] == [
        ("cache_plugin_failed", "broken", "warning")
    ]


def test_a_broken_plugin_that_was_asked_for_is_an_error_that_names_it(mocker: MockerFixture) -> None:
    mocker.patch.object(builtin, "entry_points", return_value=entry_points(("broken", "no_such_module_anywhere")))
    with pytest.raises(ConfigError, match=r"broken.*no_such_module_anywhere.*ModuleNotFoundError"):
        builtin.load_entry_points(wanted="broken")
