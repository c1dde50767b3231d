"""`tpukv doctor`: build everything, and say what was chosen, why, and whether it holds together."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.commands.engine import open_container
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
        report = examine(container)
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0


def build_all(container: Container) -> None:
    for provider in container.providers.values():
        provider()


def examine(container: Container) -> dict[str, Any]:
    """What was built, as plain values for JSON. Runs every integrity check on the way."""
    from app.providers.report import engine_facts

    return {**engine_facts(container), "providers": sorted(container.providers), "checked": _check(container)}


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
