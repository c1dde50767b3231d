"""Rotary scaling as GGUF files carry it -> the rope_scaling section of config.json."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from app.errors import ConfigError
from app.models.gguf_metadata import GgufMetadata

FACTORS_TENSOR = "rope_freqs.weight"

# Every Llama release that scales this way uses these; only the factor differs (8 for 3.1 and 3.3, 32 for 3.2).
_LOW_FREQ_FACTOR = 1.0
_HIGH_FREQ_FACTOR = 4.0
_ORIGINAL_CONTEXT = 8192


def scaling_from_metadata(metadata: GgufMetadata, architecture: str) -> dict[str, Any] | None:
    """None when positions are not scaled. The reader of config.json refuses kinds that are not supported."""
    kind = metadata.text(f"{architecture}.rope.scaling.type") or "none"
    if kind == "none":
        return None
    section = f"{architecture}.rope.scaling"
    return {
        "rope_type": kind,
        "factor": metadata.number(f"{section}.factor"),
        "original_max_position_embeddings": metadata.whole(f"{section}.original_context_length"),
    }


def scaling_from_factors(factors: np.ndarray, theta: float) -> dict[str, Any]:
    """Llama 3 scaling, which GGUF stores as its outcome: (head_dim / 2,) divisors of the frequencies.

    The parameters are the published ones with the factor found in the tensor; they are accepted only if they give the
    same divisors again. Raises ConfigError else.
    """
    factors = factors.ravel()
    factor = float(factors.max())
    expected = _llama3_factors(len(factors), theta, factor)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise ConfigError(
            field=FACTORS_TENSOR, value=factors[:4].tolist(), allowed="the frequency scaling of Llama 3.1 to 3.3"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }


def _llama3_factors(count: int, theta: float, factor: float) -> np.ndarray:
    """Short wavelengths stay, long ones are divided by `factor`, those between change over smoothly."""
    wavelengths = 2 * math.pi * theta ** (np.arange(count) / count)
    position = (_ORIGINAL_CONTEXT / wavelengths - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR)
    smooth = np.clip(position, 0.0, 1.0)
    return 1 / ((1 - smooth) / factor + smooth)
