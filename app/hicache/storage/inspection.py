"""A look into the folder of a file storage, while servers use it or not. Reads what is there; trusts no ledger."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from app.errors import ConfigError
from app.hicache.storage.base import Outcome
from app.hicache.storage.disk import outcome_of
from app.hicache.storage.file_layout import LEDGER, Entry, entries
from app.hicache.storage.file_ledger import DirectoryLedger
from app.hicache.storage.value import HEADER_BYTES, check_payload, read_header

LOCK_S = 60.0


class StoredValue(NamedTuple):
    """A value, as its file and its header say."""

    entry: Entry
    identity: str  # hex digits; empty where the header cannot be read
    outcome: Outcome  # HIT, or what is wrong with it


def stored_values(root: Path, identity: str = "") -> Iterator[StoredValue]:
    """Every value whose identity begins with `identity`, last used first. Reads headers only.

    ConfigError where there is no storage.
    """
    return _values(root, identity, HEADER_BYTES)


def verified_values(root: Path, identity: str = "") -> Iterator[StoredValue]:
    """The same, with every byte read and compared with its checksum."""
    return _values(root, identity, None)


def remove_values(root: Path, paths: Iterable[Path]) -> tuple[int, int]:
    """Remove them, in step with servers that use the folder. -> (values, bytes) removed.

    ConfigError where the folder cannot be written to, or a server keeps it locked for a minute.
    """
    num_removed = num_bytes = 0
    try:
        ledger = DirectoryLedger(root / LEDGER)
        try:
            with ledger.locked(time.monotonic() + LOCK_S) as totals:
                for path in paths:
                    with contextlib.suppress(FileNotFoundError):  # a server was first
                        size = path.stat().st_size
                        path.unlink()
                        totals.removed(size)
                        num_removed += 1
                        num_bytes += size
        finally:
            ledger.close()
    except OSError as error:
        raise ConfigError(field="path", value=str(root), allowed=f"a folder that can be written to: {error}") from error
    return num_removed, num_bytes


def _values(root: Path, identity: str, num_read: int | None) -> Iterator[StoredValue]:
    if not (root / LEDGER).is_file():
        raise ConfigError(field="path", value=str(root), allowed="a folder that the file backend has used")
    try:
        found = sorted(entries(root), key=lambda entry: -entry.used_ns)
    except OSError as error:
        raise ConfigError(field="path", value=str(root), allowed=f"a folder that can be read: {error}") from error
    for entry in found:
        value = _look(entry, num_read)
        if value.identity.startswith(identity.lower()):
            yield value


def _look(entry: Entry, num_read: int | None) -> StoredValue:
    try:
        with entry.path.open("rb") as file:
            raw = file.read() if num_read is None else file.read(num_read)
    except OSError as error:
        return StoredValue(entry, "", outcome_of(error))
    header, outcome = read_header(raw)
    if header is None:
        return StoredValue(entry, "", outcome)
    if header.key != entry.key:
        outcome = Outcome.MISPLACED
    elif num_read is None:
        outcome = check_payload(header, raw)
    elif entry.num_bytes != HEADER_BYTES + header.payload_bytes:
        outcome = Outcome.SHORT if entry.num_bytes < HEADER_BYTES + header.payload_bytes else Outcome.LONG
    return StoredValue(entry, header.identity.hex(), outcome)
