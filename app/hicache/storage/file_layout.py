"""Names in the folder of a file storage. What has another name is not ours and is never touched.

<root>/ledger                 bytes and values, shared by all processes (file_ledger.py)
<root>/tmp/<token>.lock       held by a process for as long as it writes here (file_temps.py)
<root>/tmp/<token>.<n>        a value that this process is writing
<root>/<2 hex>/<64 hex>.kv    a value, under its page key; the first two digits are the folder's name
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from app.hicache.storage.base import KEY_BYTES, PageKey

SUFFIX = ".kv"
LEDGER = "ledger"
TEMPS = "tmp"
_NAME_LENGTH = 2 * KEY_BYTES + len(SUFFIX)


class Entry(NamedTuple):
    """One value on disk."""

    key: PageKey
    path: Path
    num_bytes: int  # header and payload
    used_ns: int  # when it was last written or read, since the epoch


def value_name(key: PageKey) -> str:
    """Where a value is below its root, in folders of a file system and in names of an object store alike."""
    name = key.hex()
    return f"{name[:2]}/{name}{SUFFIX}"


def value_path(root: Path, key: PageKey) -> Path:
    return root / value_name(key)


def key_of(name: str) -> PageKey | None:
    """The key whose value has this name below the root; None where it is not ours."""
    folder, _, file = name.partition("/")
    if len(file) != _NAME_LENGTH or not file.endswith(SUFFIX):
        return None
    try:
        key = PageKey(bytes.fromhex(file[: -len(SUFFIX)]))
    except ValueError:
        return None
    return key if value_name(key) == f"{folder}/{file}" else None


def entries(root: Path) -> Iterator[Entry]:
    """Every value under `root`, in no order. A folder or file that vanishes meanwhile is left out; OSError else."""
    for folder in _listing(root):
        if len(folder.name) == 2 and folder.is_dir(follow_symlinks=False):
            yield from _values(folder)


def _values(folder: os.DirEntry[str]) -> Iterator[Entry]:
    for file in _listing(folder):
        key = key_of(f"{folder.name}/{file.name}")
        if key is None or not file.is_file(follow_symlinks=False):
            continue
        try:
            found = file.stat(follow_symlinks=False)
        except FileNotFoundError:
            continue
        yield Entry(key, Path(file.path), found.st_size, found.st_mtime_ns)


def _listing(folder: Path | os.DirEntry[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except FileNotFoundError:
        return []
