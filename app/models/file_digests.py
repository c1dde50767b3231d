"""Content digests of large files, remembered between runs."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from app.errors import ConfigError


class FileDigests:
    """SHA-256 of files. A digest is computed once for each (path, size, modification time, inode).

    Each path has a small note of its own, so that processes never wait for one another or lose each other's notes.
    """

    def __init__(self, cache_dir: Path) -> None:
        """Notes go under `cache_dir`/digests; the folder is made when the first one is written."""
        self._folder = cache_dir / "digests"

    def sha256(self, path: Path) -> str:
        """64 hex digits. Reads the whole file the first time. Raises ConfigError when it cannot be read."""
        resolved = path.resolve()
        note = self._folder / f"{hashlib.sha256(os.fsencode(resolved)).hexdigest()}.json"
        try:
            identity = _identity(resolved)
            known = _read_note(note)
            if known is not None and known["file"] == identity:
                return known["sha256"]
            with resolved.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if _identity(resolved) == identity:  # else it changed while it was read: do not remember that
                self._write_note(note, {"file": identity, "sha256": digest})
        except OSError as error:
            raise ConfigError(
                field="model_path", value=str(path), allowed=f"cannot be read: {error.strerror}"
            ) from error
        return digest

    def _write_note(self, note: Path, content: dict[str, object]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=self._folder, suffix=".tmp", delete=False) as file:
                json.dump(content, file)
            os.replace(file.name, note)
        except OSError:
            # A note only saves time. A cache that cannot be written is reported by whoever must write to it.
            return


def _identity(path: Path) -> list[object]:
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _read_note(note: Path) -> dict[str, Any] | None:
    """The note, or None when there is none or it is damaged."""
    try:
        content = json.loads(note.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and {"file", "sha256"} <= content.keys() else None
