"""Typed access to the metadata of a GGUF file: anything may be absent, nothing may have a wrong type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.errors import ConfigError


class GgufMetadata:
    """Every method raises ConfigError naming the key when its value is of another type."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self._refusal(key, "a text")

    def whole(self, key: str) -> int | None:
        value = self._values.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self._refusal(key, "a whole number")

    def number(self, key: str) -> float | None:
        value = self._values.get(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise self._refusal(key, "a number")

    def switch(self, key: str, default: bool) -> bool:
        value = self._values.get(key, default)
        if isinstance(value, bool):
            return value
        raise self._refusal(key, "true or false")

    def texts(self, key: str) -> list[str]:
        """Empty when absent."""
        value = self._values.get(key, [])
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
        raise self._refusal(key, "a list of texts")

    def wholes(self, key: str) -> list[int]:
        """Empty when absent."""
        value = self._values.get(key, [])
        if isinstance(value, list) and all(isinstance(item, int) for item in value):
            return value
        raise self._refusal(key, "a list of whole numbers")

    def numbers(self, key: str) -> list[float]:
        """Empty when absent."""
        value = self._values.get(key, [])
        if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
            return value
        raise self._refusal(key, "a list of numbers")

    def _refusal(self, key: str, allowed: str) -> ConfigError:
        return ConfigError(field=key, value=repr(self._values[key])[:60], allowed=allowed)
