"""Finding the model that the settings name, and the platform that it runs on."""

from __future__ import annotations

import jax

from app.errors import ConfigError
from app.models.bundled import find_bundled_model
from app.models.checkpoint import Checkpoint, Progress, open_checkpoint
from app.providers.sizing import host_memory_bytes


def open_model(model_path: str, progress: Progress | None) -> Checkpoint:
    """The checkpoint at `model_path`; an empty path is the bundled model. Raises ConfigError naming --model-path."""
    bundled = None if model_path else find_bundled_model()
    if not model_path and bundled is None:
        raise ConfigError(
            field="--model-path",
            value=model_path,
            allowed="a GGUF file or a Hugging Face folder; the bundled model is not installed (`make model`)",
        )
    return open_checkpoint(model_path or str(bundled), progress=progress)


def resolve_platform(device: str) -> str:
    """ "cpu" or "tpu"; "auto" takes a TPU if jax finds one. ConfigError for one that is asked for and not there."""
    if device == "cpu":
        return "cpu"
    try:
        jax.devices("tpu")
    except RuntimeError as error:
        if device == "auto":
            return "cpu"
        raise ConfigError(field="--device", value=device, allowed=f"jax finds no TPU here ({error})") from error
    return "tpu"


def memory_bytes(platform: str, tp_size: int) -> int:
    """Memory that weights and pool may share, of all the devices together. The CPU's devices share the machine's."""
    if platform == "cpu":
        return host_memory_bytes()
    return tp_size * int(jax.devices(platform)[0].memory_stats()["bytes_limit"])
