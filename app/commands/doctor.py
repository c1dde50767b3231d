"""`tpukv doctor`: build everything, and say what was chosen, why, and whether it holds together."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.commands.engine import open_container
from app.config.checks import advice
from app.config.server_args import ServerArgs

if TYPE_CHECKING:
    from app.containers import Container

OpenContainer = Callable[[ServerArgs, Callable[["Container"], object]], contextlib.AbstractContextManager["Container"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorArgs:
    """Build every part of the engine, show what was chosen and why, and check that it holds together."""

    json: bool = False
    """Print one JSON object instead of text."""

    server: ServerArgs = field(default_factory=ServerArgs)
    """The engine. Each of these can also come from the environment, as TPUKV_PAGE_SIZE and so on."""


def run(args: DoctorArgs, opening: OpenContainer = open_container) -> int:
    """0 if everything could be built and every check holds; a check that fails raises IntegrityError."""
    with opening(args.server, build_all) as container:
        report = examine(args.server, container)
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0


def build_all(container: Container) -> None:
    for provider in container.providers.values():
        provider()


def examine(args: ServerArgs, container: Container) -> dict[str, Any]:
    """What was built, as plain values for JSON. Runs every integrity check on the way."""
    cache = container.cache_type()
    model = container.model_config()
    spec = container.device_pool().spec
    devices = list(container.mesh().devices.flat)
    pool_tokens = spec.num_pages * spec.page_size
    return {
        "cache_type": cache.name,
        "cache_type_reason": cache.reason,
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "model": model.architecture,
        "model_components": sorted(component.value for component in model.components),
        "parameters": model.num_parameters,
        "context_length": args.context_length or model.context_length,
        "tp_size": container.tp_size(),
        "kv_cache_dtype": spec.dtype,
        "page_size": spec.page_size,
        "pool_pages": spec.num_pages,
        "pool_tokens": pool_tokens,
        "pool_bytes": (spec.num_pages + 1) * spec.page_bytes,  # with the padding page
        "providers": sorted(container.providers),
        "checked": _check(container),
        "warnings": advice(args, model, cache.name, pool_tokens),
    }


def _check(container: Container) -> list[str]:
    """Every owner's check. -> the owners, all of which are well."""
    checks: dict[str, Callable[[], None]] = {
        "tree_cache": container.tree_cache().check_integrity,
        "token_allocator": container.token_allocator().check_integrity,
        "req_to_token_pool": container.req_to_token_pool().check_integrity,
        "runtime": container.runtime().check_integrity,
        "scheduler_adapter": container.scheduler_adapter().check_integrity,
        "scheduler": container.scheduler().check_integrity,
    }
    for check in checks.values():
        check()
    return list(checks)


def as_text(report: dict[str, Any]) -> str:
    """One line a fact; lists are joined."""
    lines = []
    for name, value in report.items():
        shown = value if not isinstance(value, list) else ", ".join(value) or "none"
        lines.append(f"{name.replace('_', ' '):18} {shown}")
    return "\n".join([*lines, "all is well"])
