"""Choosing a storage backend by name."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from pytest_mock import MockerFixture

from app.errors import ConfigError
from app.hicache.storage import registry
from app.hicache.storage.memory import MemoryStorage
from app.hicache.storage.registry import BUILTIN_BACKENDS, StorageConfig, backend_names, open_storage
from tests.support.object_service import object_service


def refused(name: str, **fields: object) -> str:
    with pytest.raises(ConfigError) as refusal:
        open_storage(name, StorageConfig(**fields))  # type: ignore[arg-type]
    return str(refusal.value)


def plugin(_config: StorageConfig) -> MemoryStorage:
    return MemoryStorage(1)


def with_entry_points(mocker: MockerFixture, **values: str) -> None:
    points = EntryPoints(EntryPoint(name, value, registry.ENTRY_POINT_GROUP) for name, value in values.items())
    mocker.patch.object(registry, "entry_points", lambda **wanted: points.select(**wanted))


def test_an_unknown_name_lists_those_that_are_known() -> None:
    assert refused("flie") == (
        "hicache_storage_backend='flie' is not allowed: known backends are file, obstore, mooncake, memory"
    )


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("file", {}, "hicache_storage_path='' is not allowed: the file backend needs a folder"),
        ("file", {"path": "x", "capacity_bytes": 0}, "hicache_storage_size=0 is not allowed: more than 0 bytes"),
        ("file", {"path": "x", "options": {"a": "b"}}, "hicache_storage_options='a=b' is not allowed"),
        ("memory", {"path": "x"}, "hicache_storage_path='x' is not allowed: the memory backend has none"),
    ],
)
def test_settings_that_a_backend_does_not_know_are_refused(name: str, fields: dict[str, object], message: str) -> None:
    assert message in refused(name, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"path": "memory:///", "capacity_bytes": 1},
            "hicache_storage_size=1 is not allowed: the obstore backend",
        ),
        ({"path": "nope://bucket"}, "hicache_storage_path='nope://bucket' is not allowed: the URL of an object store"),
        ({"path": ""}, "hicache_storage_path='' is not allowed: the URL of an object store"),
        (
            {"path": "s3://b", "options": {"region": "x"}},
            "hicache_storage_options='region' is not allowed: names",
        ),
        ({"path": "s3://b", "options": {"aws_regoin": "x"}}, "'aws_regoin' is not valid for store 'S3'"),
        ({"path": "s3://b", "options": {"client_x": "x"}}, "the URL of an object store: Invalid key: x"),
    ],
)
def test_an_object_store_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    assert message in refused("obstore", **fields)


def test_an_object_service_that_lets_nobody_in_is_refused_at_once() -> None:
    with object_service() as service:
        service.status = 403

        assert "hicache_storage_path='s3://bucket/kv' is not allowed" in refused(
            "obstore", path="s3://bucket/kv", options=service.options()
        )


def test_mooncake_without_its_package_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    monkeypatch.delitem(sys.modules, "mooncake.store", raising=False)

    assert "install requirements/mooncake.txt, and on Debian libibverbs1" in refused("mooncake", path="127.0.0.1:1")


def test_mooncake_with_an_unknown_option_is_refused() -> None:
    assert "hicache_storage_options='port' is not allowed: known options are hostname" in refused(
        "mooncake", path="127.0.0.1:1", options={"port": "1"}
    )


def test_a_backend_of_another_package_is_opened(mocker: MockerFixture) -> None:
    with_entry_points(mocker, mine=f"{__name__}:plugin")
    sys.modules.setdefault(__name__, sys.modules[plugin.__module__])

    assert backend_names() == (*BUILTIN_BACKENDS, "mine")
    assert isinstance(open_storage("mine", StorageConfig()), MemoryStorage)


def test_a_plugin_that_fails_is_named(mocker: MockerFixture) -> None:
    with_entry_points(mocker, mine="no_such_module:opening")

    message = refused("mine")

    assert "hicache_storage_backend='mine' is not allowed: its plugin no_such_module:opening of" in message
    assert "No module named 'no_such_module'" in message


def test_the_default_capacity_is_used_where_none_is_given(tmp_path: Path) -> None:
    storage = open_storage("file", StorageConfig(path=str(tmp_path / "pages")))

    assert storage.capabilities.max_value_bytes == 16 * 2**30
    storage.close()
