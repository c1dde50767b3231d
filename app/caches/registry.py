"""The registered cache types: a dictionary with good errors.

A module registers its type when it is imported. A container seals a copy, so that what is imported later changes
nothing under a running engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from app.caches.base import BasePrefixCache, CacheDeps
from app.config.cache_type import DEFAULT_ORDER
from app.config.model_config import Component
from app.errors import RegistrationError, UnknownCacheTypeError

CacheConstructor = Callable[[CacheDeps], BasePrefixCache]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheType:
    """One registered type. `components`: the sets of model components that it can hold, each set as a whole."""

    name: str
    ctor: CacheConstructor
    components: frozenset[frozenset[Component]]
    builtin: bool


class SealedCacheTypeRegistry:
    """Cache types by name, in order of registration, as they were when it was sealed. Read-only."""

    def __init__(self, types: dict[str, CacheType], origin: CacheTypeRegistry) -> None:
        self._types = dict(types)
        self._origin = origin

    def get(self, name: str) -> CacheType:
        """UnknownCacheTypeError, or RegistrationError for a name that was registered after sealing."""
        found = self._types.get(name)
        if found is not None:
            return found
        if name in self._origin:
            raise RegistrationError(
                name=name,
                reason="it was registered after this registry was sealed; register it before building the container",
                known=self.names(),
            )
        raise UnknownCacheTypeError(name=name, known=self.names())

    def register(self, name: str, ctor: CacheConstructor, *, components: Iterable[frozenset[Component]]) -> None:
        """Always refused."""
        raise RegistrationError(
            name=name,
            reason="this registry is sealed; register it in the open one before building the container",
            known=self.names(),
        )

    def names(self) -> tuple[str, ...]:
        return tuple(self._types)

    def components_by_type(self) -> dict[str, frozenset[frozenset[Component]]]:
        """The table that `resolve_cache_type` reads."""
        return {name: cache_type.components for name, cache_type in self._types.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._types

    def __iter__(self) -> Iterator[CacheType]:
        return iter(self._types.values())

    def __len__(self) -> int:
        return len(self._types)


class CacheTypeRegistry:
    """Cache types by name, in order of registration. Open: types may still be added."""

    def __init__(self) -> None:
        self._types: dict[str, CacheType] = {}

    def register(
        self,
        name: str,
        ctor: CacheConstructor,
        *,
        components: Iterable[frozenset[Component]],
        builtin: bool = False,
    ) -> None:
        """Add a type. RegistrationError for a name that is taken, or kept for a built-in type.

        A name of DEFAULT_ORDER may be chosen without being asked for, so an outside type cannot have it.
        """
        if name in self._types:
            raise RegistrationError(name=name, reason="already registered; choose another name", known=self.names())
        if name in DEFAULT_ORDER and not builtin:
            raise RegistrationError(
                name=name, reason="this name is kept for a built-in type; choose another", known=self.names()
            )
        self._types[name] = CacheType(name=name, ctor=ctor, components=frozenset(components), builtin=builtin)

    def seal(self) -> SealedCacheTypeRegistry:
        """A read-only copy that remembers this registry, to tell "too late" from "unknown"."""
        return SealedCacheTypeRegistry(self._types, self)

    def names(self) -> tuple[str, ...]:
        return tuple(self._types)

    def __contains__(self, name: object) -> bool:
        return name in self._types


default_registry = CacheTypeRegistry()


def register_kv_cache(
    name: str,
    ctor: CacheConstructor,
    *,
    components: Iterable[frozenset[Component]],
    registry: CacheTypeRegistry = default_registry,
    builtin: bool = False,
) -> None:
    """Make a cache type known as `name`. Call it where the cache's module is imported.

    components: every set of model components that the type can serve, e.g. [frozenset({Component.FULL})].
    """
    registry.register(name, ctor, components=components, builtin=builtin)
