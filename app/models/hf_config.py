"""config.json of a Hugging Face folder -> ModelConfig.

Two kinds of families. The Llama family (llama, mistral, qwen2, qwen3) is read in full, and a switch that would change
the computation and that we do not have is refused here, before anything is built. The others are read as far as
memory is concerned (shapes and components), so that a cache can be selected for them; whether a model runner exists
is the runner's own check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.config.model_config import Component, ModelConfig, RopeScaling
from app.errors import ConfigError
from app.text.json_files import read_json_object


def load_model_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a model folder. Raises ConfigError naming the file or the field."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            field="model_path", value=str(folder), allowed="a GGUF file or a Hugging Face folder with a config.json"
        )
    return model_config_from_hf(read_json_object(path))


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read the fields of a parsed config.json.

    Raises ConfigError for a family that is not known (the known ones are listed), a field that is missing or out of
    range, and a switch of the Llama family that we do not compute.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise ConfigError(field="model_type", value=model_type, allowed=f"known are {', '.join(sorted(_FAMILIES))}")
    return _FAMILIES[model_type](_Fields(config))


class _Fields:
    """config.json with typed, checked access. Every error names the field."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

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

    def switch(self, name: str, default: bool) -> bool:
        value = self._present(name, default)
        if not isinstance(value, bool):
            raise self.refusal(name, "true or false")
        return value

    def section(self, name: str) -> _Fields:
        """A nested object; empty when absent or null."""
        value = self._values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self.refusal(name, "an object")
        return _Fields(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
            raise self.refusal(name, "a token id or a list of them")
        return tuple(ids)

    def require(self, name: str, *, default: object, allowed: tuple[object, ...]) -> None:
        """Refuse a value that would change the computation in a way we do not have."""
        value = self._values.get(name, default)
        if value not in allowed:
            raise self.refusal(name, f"supported here: {', '.join(repr(option) for option in allowed)}")

    def refusal(self, name: str, allowed: str) -> ConfigError:
        return ConfigError(field=f"config.json {name}", value=self._values.get(name), allowed=allowed)

    def _present(self, name: str, default: object) -> Any:
        value = self._values.get(name)
        return default if value is None else value


# ---- the Llama family, read in full ---------------------------------------------------------------------------


def _llama(fields: _Fields) -> ModelConfig:
    fields.require("attention_bias", default=False, allowed=(False,))
    fields.require("mlp_bias", default=False, allowed=(False,))
    return _dense(fields)


def _mistral(fields: _Fields) -> ModelConfig:
    window = _window(fields)
    if window is None:
        return _dense(fields)
    return _dense(fields, sliding_window=window, components=frozenset({Component.SWA}))


def _qwen2(fields: _Fields) -> ModelConfig:
    return _dense(fields, attention_bias=True, **_late_windows(fields))


def _qwen3(fields: _Fields) -> ModelConfig:
    fields.require("attention_bias", default=False, allowed=(False,))
    return _dense(fields, qk_norm=True, **_late_windows(fields))


def _dense(fields: _Fields, **family: Any) -> ModelConfig:
    fields.require("hidden_act", default="silu", allowed=("silu",))
    fields.require("quantization_config", default=None, allowed=(None,))
    fields.require("partial_rotary_factor", default=1.0, allowed=(None, 1.0))
    return _shape(fields, rope_scaling=_rope_scaling(fields), **family)


def _window(fields: _Fields) -> int | None:
    """The sliding window, if it is shorter than the context; a longer one never cuts anything."""
    if fields.raw("sliding_window") is None:
        return None
    window = fields.count("sliding_window")
    return window if window < fields.count("max_position_embeddings") else None


def _late_windows(fields: _Fields) -> dict[str, Any]:
    """Qwen: with use_sliding_window, the layers from max_window_layers on have a window."""
    if not fields.switch("use_sliding_window", False):
        return {}
    window = _window(fields)
    if window is None:
        return {}
    first = fields.raw("max_window_layers") or 0
    full_layers = {Component.FULL} if first > 0 else set()
    window_layers = {Component.SWA} if first < fields.count("num_hidden_layers") else set()
    if not window_layers:
        return {}
    return {"sliding_window": window, "components": frozenset(full_layers | window_layers)}


def _rope_scaling(fields: _Fields) -> RopeScaling:
    # Newer files keep theta and the scaling together in rope_parameters.
    name = "rope_parameters" if fields.raw("rope_parameters") else "rope_scaling"
    section = fields.section(name)
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
    raise fields.refusal(name, "rope types supported here: default, linear, llama3")


# ---- families read as far as memory is concerned ----------------------------------------------------------------


def _with_window(fields: _Fields) -> ModelConfig:
    return _shape(
        fields,
        sliding_window=fields.count("sliding_window"),
        components=frozenset({Component.FULL, Component.SWA}),
    )


def _with_recurrence(fields: _Fields) -> ModelConfig:
    return _shape(fields, components=frozenset({Component.FULL, Component.RECURRENT}))


# ---- what all have in common ---------------------------------------------------------------------------------


def _shape(fields: _Fields, **family: Any) -> ModelConfig:
    hidden_size = fields.count("hidden_size")
    num_heads = fields.count("num_attention_heads")
    num_kv_heads = fields.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.refusal("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
    if fields.raw("head_dim") is None and hidden_size % num_heads:
        raise fields.refusal("hidden_size", f"a multiple of num_attention_heads={num_heads} where head_dim is absent")
    theta = fields.section("rope_parameters").raw("rope_theta")
    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=fields.raw("model_type"),
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.count("head_dim", hidden_size // num_heads),
        context_length=fields.count("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=fields.number("rope_theta", 10_000.0 if theta is None else theta),
        tie_word_embeddings=fields.switch("tie_word_embeddings", fields.raw("model_type") in _TIED_BY_DEFAULT),
        eos_token_ids=fields.token_ids("eos_token_id"),
        bos_token_id=bos[0] if bos else None,
        **family,
    )


_TIED_BY_DEFAULT = frozenset({"gemma2", "gemma3_text"})

_FAMILIES: dict[str, Callable[[_Fields], ModelConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _with_window,
    "gemma3_text": _with_window,
    "gpt_oss": _with_window,
    "qwen3_next": _with_recurrence,
    "falcon_h1": _with_recurrence,
    "jamba": _with_recurrence,
}
