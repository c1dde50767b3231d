"""`tpukv doctor`: build everything, and say what was chosen, why, and whether it holds together."""

from __future__ import annotations

import contextlib
import json
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.commands.engine import open_container
from app.commands.progress import progress_bar
from app.config.checks import restore_advice
from app.config.server_args import ServerArgs

if TYPE_CHECKING:
    from app.containers import Container

OpenContainer = Callable[[ServerArgs, Callable[["Container"], object]], contextlib.AbstractContextManager["Container"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorArgs:
    """Build every part of the engine, show what was chosen and why, and check that it holds together."""

    json: bool = False
    """Print one JSON object instead of text."""

    target: str = ""
    """A TPU that need not be here, as v5e:2x2: size the engine for it and compile its step, instead of building one."""

    prefill_rate: float | None = None
    """Prompt tokens that the engine computes in a second, to judge whether restoring from the host is quicker."""

    server: ServerArgs = field(default_factory=ServerArgs)
    """The engine. Each of these can also come from the environment, as TPUKV_PAGE_SIZE and so on."""


def run(args: DoctorArgs, opening: OpenContainer = open_container) -> int:
    """0 if everything could be built and every check holds; a check that fails raises IntegrityError."""
    report = examine_target(args.server, args.target) if args.target else _build_and_examine(args, opening)
    print(json.dumps(report, indent=2) if args.json else as_text(report))
    return 0


def _build_and_examine(args: DoctorArgs, opening: OpenContainer) -> dict[str, Any]:
    with opening(args.server, build_all) as container:
        return examine(container, args.prefill_rate)


def examine_target(server_args: ServerArgs, target: str) -> dict[str, Any]:
    """The engine on a TPU that is not here, as plain values for JSON. ConfigError when it cannot be one."""
    from app.providers.model import open_model
    from app.providers.target import target_facts

    with progress_bar() as report:
        made_for = open_model(server_args.model_path, report).model_config
        report(f"compiling for {target}", 0.0)
        return target_facts(server_args, made_for, target)


def build_all(container: Container) -> None:
    for provider in container.providers.values():
        provider()


def examine(container: Container, prefill_rate: float | None = None) -> dict[str, Any]:
    """What was built, as plain values for JSON. Runs every integrity check, and measures copies between tiers.

    prefill_rate: prompt tokens computed a second, if known.
    """
    from app.providers.report import engine_facts

    facts = {**engine_facts(container), **_measured(container)}
    facts["warnings"] = facts.pop("warnings") + _advice_on_rates(facts, prefill_rate)
    return {**facts, "providers": sorted(container.providers), "checked": _check(container)}


def _measured(container: Container) -> dict[str, Any]:
    from app.providers.tier_report import copy_facts

    carrier = container.page_carriers().pages
    if container.host_size() is None or carrier is None:
        return {}
    container.runtime()  # opens the pool
    return copy_facts(container.device_pool(), carrier, container.pool_spec())


def _advice_on_rates(facts: dict[str, Any], prefill_rate: float | None) -> list[str]:
    from app.providers.tier_report import RESTORED_RATE

    if prefill_rate is None or RESTORED_RATE not in facts:
        return []
    return restore_advice(facts[RESTORED_RATE], prefill_rate)


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
