"""Where cache types come from: the modules named here, and entry points of other packages."""

from __future__ import annotations

import importlib
from importlib.metadata import EntryPoint, entry_points

import structlog

from app.errors import ConfigError

BUILTIN_MODULES = (
    "app.caches.unified_radix_cache",
    "app.caches.radix_cache",
    "app.caches.chunk_cache",
)
ENTRY_POINT_GROUP = "tpukv.kv_caches"

_log = structlog.get_logger(__name__)


def load_builtin_caches() -> None:
    """Import the modules above; each registers its type in the default registry. Idempotent."""
    for module in BUILTIN_MODULES:
        importlib.import_module(module)


def load_entry_points(wanted: str | None = None) -> None:
    """Import outside cache types: entry points of the group "tpukv.kv_caches", named as the type that they register.

    One that fails to import is a warning, unless its name is `wanted`, the cache type asked for: then ConfigError.
    """
    for entry_point in entry_points(group=ENTRY_POINT_GROUP):
        try:
            entry_point.load()
        except Exception as error:
            if entry_point.name == wanted:
                raise ConfigError(
                    field="--cache-type", value=wanted, allowed=f"its plugin {_source(entry_point)} failed: {error!r}"
                ) from error
            _log.warning("cache_plugin_failed", name=entry_point.name, source=_source(entry_point), error=repr(error))


def _source(entry_point: EntryPoint) -> str:
    package = entry_point.dist.name if entry_point.dist else "an unknown package"
    return f"{entry_point.value} of {package}"
