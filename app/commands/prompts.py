"""Prompts as a person gives them: as arguments, in a file, or on standard input. Checked before a model loads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from app.errors import ConfigError

STDIN = "standard input"


def read_prompts(prompts: Sequence[str], prompt_file: Path | None, stdin: BinaryIO) -> list[str]:
    """`prompts`, then those of the file; with neither, those on standard input. ConfigError for the first bad one."""
    found = list(prompts)
    for prompt in found:
        check_text("--prompt", prompt, prompt)
    if prompt_file is not None:
        found += _of_file(prompt_file)
    elif not found:
        found = _of_lines(STDIN, "", _decoded(STDIN, "", stdin.read()))
    return found


def check_text(field: str, value: str, text: str) -> None:
    """Refuse an empty text, and one that no tokenizer can read: half a surrogate pair, or bytes that are not UTF-8."""
    if not text:
        raise ConfigError(field=field, value=value, allowed="a prompt needs at least one character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(field=field, value=_short(value), allowed="text that is valid UTF-8") from None


def _of_file(path: Path) -> list[str]:
    field = "--prompt-file"
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigError(field=field, value=str(path), allowed=f"it cannot be read: {reason}") from None
    text = _decoded(field, str(path), data)
    if path.suffix == ".jsonl":
        return _of_json_lines(field, str(path), text)
    return _of_lines(field, str(path), text)


def _decoded(field: str, value: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")  # a byte order mark is no part of the first prompt
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(field=field, value=value, allowed=f"line {line} is not valid UTF-8") from None


def _of_lines(field: str, value: str, text: str) -> list[str]:
    """One prompt a line. Blank lines are there for the eye; the last line may lack its end."""
    prompts = [line for line in _lines(text) if line.strip()]
    return _at_least_one(field, value, prompts)


def _of_json_lines(field: str, value: str, text: str) -> list[str]:
    prompts = []
    for number, line in enumerate(_lines(text), 1):
        if not line.strip():
            continue
        prompt = _json_prompt(line)
        if prompt is None:
            raise ConfigError(field=field, value=value, allowed=f'line {number} is not {{"prompt": "some text"}}')
        check_text(f"{field} {value}, line {number}", prompt, prompt)
        prompts.append(prompt)
    return _at_least_one(field, value, prompts)


def _json_prompt(line: str) -> str | None:
    """The prompt in one line of JSON; None if there is none. Other keys are left alone."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    return prompt if isinstance(prompt, str) else None


def _at_least_one(field: str, value: str, prompts: list[str]) -> list[str]:
    if not prompts:
        raise ConfigError(field=field, value=value, allowed="it needs at least one prompt, one a line")
    return prompts


def _lines(text: str) -> list[str]:
    """Lines by line feed alone, as an editor counts them: other separators may be part of a prompt."""
    return [line.removesuffix("\r") for line in text.split("\n")]


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
