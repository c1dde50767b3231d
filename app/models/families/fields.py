"""config.json with typed, checked access, and what all families read from it in the same way."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from app.config.model_config import Component, ModelConfig, RopeScaling
from app.errors import ConfigError

# Hugging Face's words for activations -> ours.
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_KINDS_OF_ATTENTION = {"full_attention": Component.FULL, "sliding_attention": Component.SWA}


class RopeFields(NamedTuple):
    theta: float
    scaling: RopeScaling = RopeScaling()


class Fields:
    """One object of config.json. Every error names the field."""

    def __init__(self, values: Mapping[str, Any], place: str = "config.json ") -> None:
        """place: what errors say before a field's name."""
        self._values = values
        self._place = place

    def raw(self, name: str) -> Any:
        return self._values.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.refusal(name, "a whole number above zero")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._present(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.refusal(name, "a number above zero")
        return float(value)

    def number_or_none(self, name: str, absent: float | None = None) -> float | None:
        """absent: what a file means that does not have the field; null is None."""
        if name not in self._values:
            return absent
        return None if self.raw(name) is None else self.number(name)

    def switch(self, name: str, default: bool) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def section(self, name: str) -> Fields:
        """A nested object; empty when absent or null."""
        value = self._values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.refusal(name, "an object")
        return Fields(value, f"{self._place}{name}.")

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
            raise self.refusal(name, "a token id or a list of them")
        return tuple(ids)

    def layer_numbers(self, name: str) -> frozenset[int]:
        """A list of layers; empty when absent."""
        value = self._values.get(name) or []
        if not isinstance(value, list) or not all(isinstance(layer, int) for layer in value):
            raise self.refusal(name, "a list of layer numbers")
        return frozenset(value)

    def require(self, name: str, *, default: object, allowed: tuple[object, ...]) -> None:
        """Refuse a value that would change the computation in a way we do not have."""
        value = self._values.get(name, default)
        if value not in allowed:
            raise self.refusal(name, f"supported here: {', '.join(repr(option) for option in allowed)}")

    def activation(self, name: str = "hidden_act", default: str = "silu") -> str:
        self.require(name, default=default, allowed=tuple(ACTIVATIONS))
        return ACTIVATIONS[self._present(name, default)]

    def refusal(self, name: str, allowed: str) -> ConfigError:
        return ConfigError(field=f"{self._place}{name}", value=self._values.get(name), allowed=allowed)

    def _present(self, name: str, default: object) -> Any:
        value = self._values.get(name)
        return default if value is None else value


def model_config(fields: Fields, **family: Any) -> ModelConfig:
    """What every family has, and what this one has beside or instead of it."""
    fields.require("quantization_config", default=None, allowed=(None,))
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    if fields.raw("head_dim") is None and hidden_size % num_heads:
        raise fields.refusal("hidden_size", f"a multiple of num_attention_heads={num_heads} where head_dim is absent")
    bos = fields.token_ids("bos_token_id")
    shape = {
        "architecture": fields.raw("model_type"),
        "vocab_size": fields.count("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.count("intermediate_size"),
        "num_layers": fields.count("num_hidden_layers"),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": fields.count("head_dim", hidden_size // num_heads),
        "context_length": fields.count("max_position_embeddings"),
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_word_embeddings": fields.switch("tie_word_embeddings", False),
        "eos_token_ids": fields.token_ids("eos_token_id"),
        "bos_token_id": bos[0] if bos else None,
    }
    return ModelConfig(**{**shape, **family})


def rope(fields: Fields, default_theta: float = 10_000.0) -> dict[str, Any]:
    """rope_theta and rope_scaling of a ModelConfig, for families with one rope that turns whole heads."""
    fields.require("partial_rotary_factor", default=1.0, allowed=(None, 1.0))
    name = "rope_parameters" if fields.raw("rope_parameters") else "rope_scaling"
    fields.section(name).require("partial_rotary_factor", default=1.0, allowed=(None, 1.0))
    found = rope_of(fields, name, fields.section(name), default_theta)
    return {"rope_theta": found.theta, "rope_scaling": found.scaling}


def rope_of(fields: Fields, name: str, section: Fields, default_theta: float = 10_000.0) -> RopeFields:
    """The rope that a section describes, which newer files keep theta in as well. `name`: of the section."""
    scaling = _scaling(fields, name, section)
    return RopeFields(section.number("rope_theta", fields.number("rope_theta", default_theta)), scaling)


def _scaling(fields: Fields, name: str, section: Fields) -> RopeScaling:
    kind = section.raw("rope_type") or section.raw("type") or "default"
    if kind == "default":
        return RopeScaling()
    if kind == "linear":
        return RopeScaling(kind="linear", factor=section.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind="llama3",
            factor=section.number("factor"),
            low_freq_factor=section.number("low_freq_factor"),
            high_freq_factor=section.number("high_freq_factor"),
            original_context_length=section.count("original_max_position_embeddings"),
        )
    if kind == "yarn":
        return RopeScaling(
            kind="yarn",
            factor=section.number("factor"),
            original_context_length=section.count("original_max_position_embeddings"),
            beta_fast=section.number("beta_fast", 32.0),
            beta_slow=section.number("beta_slow", 1.0),
            whole_pairs=section.switch("truncate", True),
            attention_factor=section.number("attention_factor", _yarn_attention_factor(section)),
        )
    raise fields.refusal(name, "rope types supported here: default, linear, llama3, yarn")


def yarn_length(factor: float, strength: float = 1.0) -> float:
    """By how much longer queries and keys become where the context is `factor` times longer (arXiv:2309.00071)."""
    return 0.1 * strength * math.log(factor) + 1.0 if factor > 1 else 1.0


def _yarn_attention_factor(section: Fields) -> float:
    factor = section.number("factor")
    if section.raw("mscale") and section.raw("mscale_all_dim"):
        return yarn_length(factor, section.number("mscale")) / yarn_length(factor, section.number("mscale_all_dim"))
    return yarn_length(factor)


def windows(fields: Fields, window: int | None, by_default: tuple[Component, ...]) -> dict[str, Any]:
    """components, layer_components and sliding_window of a ModelConfig whose layers differ by their window alone.

    window: None where no layer's window cuts anything. by_default: each layer's kind where the file does not say.
    """
    if window is None:
        return {}
    kinds = _layer_types(fields, by_default)
    components = frozenset(kinds)
    if components == {Component.FULL}:
        return {}
    alike = len(components) == 1
    return {
        "sliding_window": window,
        "components": components,
        "layer_components": () if alike else tuple(frozenset({kind}) for kind in kinds),
    }


def shorter_window(fields: Fields) -> int | None:
    """The sliding window, if it is shorter than the context; a longer one never cuts anything."""
    if fields.raw("sliding_window") is None:
        return None
    window = fields.count("sliding_window")
    return window if window < fields.count("max_position_embeddings") else None


def _layer_types(fields: Fields, by_default: tuple[Component, ...]) -> tuple[Component, ...]:
    types = fields.raw("layer_types")
    if types is None:
        return by_default
    if not isinstance(types, list) or len(types) != len(by_default) or not set(types) <= set(_KINDS_OF_ATTENTION):
        raise fields.refusal(
            "layer_types", f"one of {', '.join(_KINDS_OF_ATTENTION)} for each of {len(by_default)} layers"
        )
    return tuple(_KINDS_OF_ATTENTION[kind] for kind in types)
