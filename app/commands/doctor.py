"""`tpukv doctor`: build everything, and say what was chosen, why, and whether it holds together."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.commands.engine import open_container
from app.config.checks import advice
from app.config.server_args import CHUNKING_OFF, ServerArgs

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
    served, made_for = container.model_config(), container.base_model_config()
    spec = container.device_pool().spec
    devices = list(container.mesh().devices.flat)
    dtype = container.dtype()
    pool_tokens = spec.num_pages * spec.page_size
    return {
        "cache_type": cache.name,
        "cache_type_reason": cache.reason,
        "device": f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform})",
        "device_memory_bytes": container.memory_bytes(),
        "tp_size": container.tp_size(),
        "model": served.architecture,
        "model_components": sorted(component.value for component in served.components),
        "dtype": dtype,
        "weights_bytes": served.num_parameters * (4 if dtype == "float32" else 2),
        "context_length": served.context_length,
        "kv_cache_dtype": spec.dtype,
        "page_size": spec.page_size,
        "pool_pages": spec.num_pages,
        "pool_tokens": pool_tokens,
        "pool_bytes": (spec.num_pages + 1) * spec.page_bytes,  # with the padding page
        **_buckets(args, served.context_length),
        "providers": sorted(container.providers),
        "checked": _check(container),
        "warnings": advice(args, made_for, cache.name, pool_tokens),
    }


def _buckets(args: ServerArgs, context_length: int) -> dict[str, list[int]]:
    """The sizes that programs are compiled for, each when it is first needed."""
    from app.runtime.dispatch import MIN_CHUNK, MIN_CONTEXT, MIN_ROWS

    chunk = context_length if args.chunked_prefill_size == CHUNKING_OFF else args.chunked_prefill_size
    return {
        "buckets_rows": _powers_of_two(MIN_ROWS, args.max_running_requests),
        "buckets_chunk_tokens": _powers_of_two(MIN_CHUNK, chunk),
        "buckets_context_tokens": _powers_of_two(max(MIN_CONTEXT, args.page_size), context_length),
    }


def _powers_of_two(smallest: int, largest: int) -> list[int]:
    from app.runtime.dispatch import bucket

    sizes = [bucket(smallest, 1)]
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return sizes


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
    """One line a fact, lists joined and wrapped."""
    lines = []
    for name, value in report.items():
        values = value if isinstance(value, list) else [value]
        shown = ", ".join(f"{one:,}" if isinstance(one, int) else one for one in values) or "none"
        lines += textwrap.wrap(shown, 96, initial_indent=f"{name.replace('_', ' '):24}", subsequent_indent=" " * 24)
    return "\n".join([*lines, "all is well"])
