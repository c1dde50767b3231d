"""The storage backends by name: those of this package, and those of others through entry points."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points

from app.errors import ConfigError
from app.hicache.storage.base import HiCacheStorage

ENTRY_POINT_GROUP = "tpukv.hicache_storages"
BUILTIN_BACKENDS = {
    "file": "app.hicache.storage.backends:open_file",
    "obstore": "app.hicache.storage.backends:open_obstore",
    "mooncake": "app.hicache.storage.backends:open_mooncake",
    "memory": "app.hicache.storage.backends:open_memory",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """What a backend is told. Each takes what it knows and refuses the rest with ConfigError."""

    path: str = ""
    """Where values are: a folder, the URL of an object store, HOST:PORT of Mooncake's master."""

    capacity_bytes: int | None = None
    """Most bytes of values, headers included; None is the backend's default."""

    options: Mapping[str, str] = field(default_factory=dict)
    """Settings of the backend's own."""


OpenStorage = Callable[[StorageConfig], HiCacheStorage]


def backend_names() -> tuple[str, ...]:
    """Every backend that can be asked for."""
    return tuple(dict.fromkeys([*BUILTIN_BACKENDS, *entry_points(group=ENTRY_POINT_GROUP).names]))


def open_storage(name: str, config: StorageConfig) -> HiCacheStorage:
    """A storage that answers, or ConfigError: an unknown name, a package that is missing, a place that is not there."""
    if name in BUILTIN_BACKENDS:
        module, _, function = BUILTIN_BACKENDS[name].partition(":")
        opening: OpenStorage = vars(importlib.import_module(module))[function]
        return opening(config)
    for entry_point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        return _of_plugin(entry_point)(config)
    raise ConfigError(
        field="hicache_storage_backend", value=name, allowed=f"known backends are {', '.join(backend_names())}"
    )


def _of_plugin(entry_point: EntryPoint) -> OpenStorage:
    try:
        opening: OpenStorage = entry_point.load()
    except Exception as error:
        package = entry_point.dist.name if entry_point.dist else "an unknown package"
        raise ConfigError(
            field="hicache_storage_backend",
            value=entry_point.name,
            allowed=f"its plugin {entry_point.value} of {package} failed: {error!r}",
        ) from error
    return opening
