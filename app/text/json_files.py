"""Reading the small JSON files of a model folder, with errors that name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from app.errors import ConfigError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigError naming the file when it is missing, unreadable or no object."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(field="model_path", value=str(path), allowed=f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # undecodable bytes and malformed JSON alike
        raise ConfigError(field="model_path", value=str(path), allowed=f"is not valid JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ConfigError(field="model_path", value=str(path), allowed="must hold a JSON object")
    return parsed


def read_optional_json_object(path: Path) -> dict[str, Any]:
    """Like `read_json_object`; an empty dict when there is no such file."""
    return read_json_object(path) if path.exists() else {}
