"""Which cache type serves a model: the selection table, and every refusal of a combination.

    disaggregation_mode | default                             | explicit --cache-type
    --------------------|-------------------------------------|---------------------------------------------
    null, prefill       | first of DEFAULT_ORDER that is      | any registered type that covers the model
                        | registered and covers the model     |
    decode              | chunk_cache                         | chunk_cache; anything else is refused

With --enable-hierarchical-cache, whose tiers only unified_radix_cache has:

    null, prefill       | unified_radix_cache                 | unified_radix_cache; anything else is refused
    decode              | refused                             | refused

Pure. `check_combination` needs the registered names alone, so it runs before even a model's config is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from app.config.model_config import Component, ModelConfig
from app.config.server_args import ServerArgs
from app.errors import CacheTypeConflictError, ConfigError, UnknownCacheTypeError

# Only these are ever chosen unasked. A type that becomes able to cover more models moves up to them by itself.
CHUNK_CACHE = "chunk_cache"
TIERED_CACHE = "unified_radix_cache"
DEFAULT_ORDER = (TIERED_CACHE, "radix_cache", CHUNK_CACHE)

# For each registered type, in order of registration: the sets of components that it can hold for a model.
ComponentsByType = Mapping[str, frozenset[frozenset[Component]]]


class CacheTypeChoice(NamedTuple):
    """The chosen cache type, and why, in words for a person."""

    name: str
    reason: str


def check_combination(args: ServerArgs, known_names: Collection[str]) -> None:
    """Refuse what needs no model to be refused: decode with another type, tiers below a type that has none, and a name
    that nobody registered.
    """
    decode = args.disaggregation_mode == "decode"
    if decode and args.cache_type not in (None, CHUNK_CACHE):
        raise CacheTypeConflictError(
            field="--cache-type",
            value=args.cache_type,
            other_field="--disaggregation-mode",
            other_value=args.disaggregation_mode,
            allowed=f"a decode node gets its prefixes from a prefill node and uses {CHUNK_CACHE}",
        )
    if args.enable_hierarchical_cache:
        _check_tiers(args)
    wanted = CHUNK_CACHE if decode else TIERED_CACHE if args.enable_hierarchical_cache else args.cache_type
    if wanted is not None and wanted not in known_names:
        raise UnknownCacheTypeError(name=wanted, known=tuple(known_names))


def _check_tiers(args: ServerArgs) -> None:
    wrong = (
        (args.disaggregation_mode == "decode", "--disaggregation-mode", args.disaggregation_mode, CHUNK_CACHE),
        (args.cache_type not in (None, TIERED_CACHE), "--cache-type", args.cache_type, "that type"),
    )
    for applies, field, value, cache in wrong:
        if applies:
            raise CacheTypeConflictError(
                field=field,
                value=value,
                other_field="--enable-hierarchical-cache",
                other_value=True,
                allowed=f"{TIERED_CACHE} has tiers below the device, and {cache} has none",
            )


def resolve_cache_type(args: ServerArgs, model: ModelConfig, components_by_type: ComponentsByType) -> CacheTypeChoice:
    """The cache type for these settings and this model. Raises ConfigError; never falls back in silence."""
    check_combination(args, components_by_type)
    if args.cache_type is not None:
        _check_covers(args.cache_type, model, components_by_type[args.cache_type])
        return CacheTypeChoice(args.cache_type, "asked for by --cache-type")
    if args.enable_hierarchical_cache:
        _check_covers(TIERED_CACHE, model, components_by_type[TIERED_CACHE])
        return CacheTypeChoice(TIERED_CACHE, "--enable-hierarchical-cache: the one cache type that has tiers")
    if args.disaggregation_mode == "decode":
        _check_covers(CHUNK_CACHE, model, components_by_type[CHUNK_CACHE])
        return CacheTypeChoice(CHUNK_CACHE, "--disaggregation-mode decode: the prefix was computed on a prefill node")
    return _default_for(model, components_by_type)


def _default_for(model: ModelConfig, components_by_type: ComponentsByType) -> CacheTypeChoice:
    needed = _in_words(model.components)
    for name in DEFAULT_ORDER:
        if name not in components_by_type or model.components not in components_by_type[name]:
            continue
        if name == CHUNK_CACHE:
            return CacheTypeChoice(name, f"no registered cache type reuses prefixes of a model with {needed}")
        return CacheTypeChoice(name, f"first of {', '.join(DEFAULT_ORDER)} that covers a model with {needed}")
    raise ConfigError(
        field="--cache-type",
        value=None,
        allowed=f"none of {', '.join(DEFAULT_ORDER)} is registered for a model with {needed}; "
        f"known cache types are {', '.join(components_by_type)}",
    )


def _check_covers(name: str, model: ModelConfig, covered: frozenset[frozenset[Component]]) -> None:
    if model.components in covered:
        return
    # The declared set that comes closest shows best what is missing; the text breaks ties the same way every time.
    nearest = min(covered, key=lambda held: (len(model.components ^ held), _in_words(held)), default=frozenset())
    missing = model.components - nearest
    lacks = f"it has no {_in_words(missing)} component" if missing else f"it holds {_in_words(nearest)} together only"
    raise ConfigError(
        field="--cache-type",
        value=name,
        allowed=f"the model needs {_in_words(model.components)} and {lacks}",
    )


def _in_words(components: frozenset[Component]) -> str:
    """Components in the order in which Component declares them: "full + swa"."""
    return " + ".join(component.value for component in Component if component in components)
