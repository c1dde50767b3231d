"""From a StorageConfig to each backend of this package. What is optional is imported when it is chosen."""

from __future__ import annotations

from pathlib import Path

from app.errors import ConfigError
from app.hicache.storage.base import HiCacheStorage
from app.hicache.storage.file import FileStorage
from app.hicache.storage.memory import MemoryStorage
from app.hicache.storage.registry import StorageConfig

DEFAULT_CAPACITY_BYTES = 16 * 2**30


def open_file(config: StorageConfig) -> FileStorage:
    """`path`: a folder, made if it is not there."""
    if not config.path:
        raise _wrong("path", config.path, "the file backend needs a folder")
    _refuse_options(config, "file")
    return FileStorage(Path(config.path), _capacity(config))


def open_memory(config: StorageConfig) -> MemoryStorage:
    if config.path:
        raise _wrong("path", config.path, "the memory backend has none")
    _refuse_options(config, "memory")
    return MemoryStorage(_capacity(config))


def open_obstore(config: StorageConfig) -> HiCacheStorage:
    """`path`: a URL. No capacity: objects live as long as the service keeps them."""
    from app.hicache.storage.object_store import ObjectStorage

    if config.capacity_bytes is not None:
        raise _wrong(
            "size", config.capacity_bytes, "the obstore backend has no quota; give the bucket a lifecycle rule"
        )
    return ObjectStorage(config.path, config.options)


def open_mooncake(config: StorageConfig) -> HiCacheStorage:
    """`path`: HOST:PORT of the master. Capacity: the memory that this process lends."""
    from app.hicache.storage.mooncake import MooncakeStorage

    return MooncakeStorage(config.path, _capacity(config), config.options)


def _capacity(config: StorageConfig) -> int:
    if config.capacity_bytes is None:
        return DEFAULT_CAPACITY_BYTES
    if config.capacity_bytes <= 0:
        raise _wrong("size", config.capacity_bytes, "more than 0 bytes")
    return config.capacity_bytes


def _refuse_options(config: StorageConfig, backend: str) -> None:
    for name, value in config.options.items():
        raise _wrong("options", f"{name}={value}", f"the {backend} backend has no options")


def _wrong(setting: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(field=f"hicache_storage_{setting}", value=value, allowed=allowed)
