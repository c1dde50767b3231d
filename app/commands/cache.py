"""`tpukv cache ls | du | verify | clear`: a look into the folder of a file storage, whether a server runs or not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from app.hicache.storage.inspection import StoredValue

_SHOWN_DIGITS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LsArgs:
    """List the values of a file storage, last used first."""

    path: Path
    """Folder of the storage."""

    identity: str = ""
    """Only values whose identity (model, weights and layout) begins with these hex digits."""

    json: bool = False
    """Print one JSON array instead of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DuArgs:
    """Tell how many values and bytes a file storage has, for each identity (model, weights and layout)."""

    path: Path
    """Folder of the storage."""

    json: bool = False
    """Print one JSON array instead of a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyArgs:
    """Read every value of a file storage and compare it with its checksum; exit code 1 if any is bad."""

    path: Path
    """Folder of the storage."""

    identity: str = ""
    """Only values whose identity (model, weights and layout) begins with these hex digits."""

    json: bool = False
    """Print one JSON object instead of text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClearArgs:
    """Remove values from a file storage, also while servers use it. Does not ask."""

    path: Path
    """Folder of the storage."""

    identity: str = ""
    """Only values whose identity (model, weights and layout) begins with these hex digits."""

    json: bool = False
    """Print one JSON object instead of text."""


def run_ls(args: LsArgs) -> int:
    from app.hicache.storage.inspection import stored_values

    values = list(stored_values(args.path, args.identity))
    if args.json:
        print(json.dumps([_facts(value) for value in values], indent=2))
        return 0
    _show(
        ("key", "identity", "bytes", "last used", "state"),
        [
            (
                value.entry.key.hex()[:_SHOWN_DIGITS],
                value.identity[:_SHOWN_DIGITS],
                f"{value.entry.num_bytes:,}",
                _time(value.entry.used_ns),
                "" if _is_good(value) else str(value.outcome),
            )
            for value in values
        ],
    )
    return 0


def run_du(args: DuArgs) -> int:
    from app.hicache.storage.inspection import stored_values

    groups: dict[str, list[StoredValue]] = {}
    for value in stored_values(args.path):
        groups.setdefault(value.identity, []).append(value)
    rows = [_Use.of(identity, values) for identity, values in groups.items()]
    if args.json:
        print(json.dumps([row._asdict() for row in rows], indent=2))
        return 0
    total = _Use("all", sum(row.num_values for row in rows), sum(row.num_bytes for row in rows), "")
    _show(
        ("identity", "values", "bytes", "last used"),
        [
            (row.identity[:_SHOWN_DIGITS] or "unreadable", f"{row.num_values:,}", f"{row.num_bytes:,}", row.last_used)
            for row in [*rows, total]
        ],
    )
    return 0


def run_verify(args: VerifyArgs) -> int:
    from app.hicache.storage.inspection import verified_values

    num_values = 0
    bad = []
    for value in verified_values(args.path, args.identity):
        num_values += 1
        if not _is_good(value):
            bad.append(value)
    if args.json:
        print(json.dumps({"num_values": num_values, "bad": [_facts(value) for value in bad]}, indent=2))
    else:
        for value in bad:
            print(f"{value.entry.path}: {value.outcome}")
        print(f"{num_values:,} values, {len(bad):,} of them bad")
    return 1 if bad else 0


def run_clear(args: ClearArgs) -> int:
    from app.hicache.storage.inspection import remove_values, stored_values

    paths = [value.entry.path for value in stored_values(args.path, args.identity)]
    num_values, num_bytes = remove_values(args.path, paths)
    if args.json:
        print(json.dumps({"num_values": num_values, "num_bytes": num_bytes}))
    else:
        print(f"removed {num_values:,} values, {num_bytes:,} bytes")
    return 0


class _Use(NamedTuple):
    """What one identity has in the folder. Its fields are the keys of the JSON."""

    identity: str
    num_values: int
    num_bytes: int
    last_used: str

    @classmethod
    def of(cls, identity: str, values: Sequence[StoredValue]) -> _Use:
        num_bytes = sum(value.entry.num_bytes for value in values)
        return cls(identity, len(values), num_bytes, _time(max(value.entry.used_ns for value in values)))


def _is_good(value: StoredValue) -> bool:
    from app.hicache.storage.base import Outcome

    return value.outcome is Outcome.HIT


def _facts(value: StoredValue) -> dict[str, Any]:
    return {
        "key": value.entry.key.hex(),
        "identity": value.identity,
        "num_bytes": value.entry.num_bytes,
        "last_used": _time(value.entry.used_ns),
        "state": "good" if _is_good(value) else str(value.outcome),
        "path": str(value.entry.path),
    }


def _time(ns: int) -> str:
    return datetime.fromtimestamp(ns / 1e9, UTC).isoformat(timespec="seconds")


def _show(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for name in columns:
        table.add_column(name, justify="right" if name in ("bytes", "values") else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=100, highlight=False).print(table)
