"""The device mesh: axes "data" (1 for now) and "tensor"."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from app.errors import ConfigError

DATA_AXIS = "data"
TENSOR_AXIS = "tensor"


def make_mesh(tp_size: int, platform: str) -> Mesh:
    """A (1, tp_size) mesh over the first devices of `platform` ("cpu", "tpu").

    Starts the backend of that platform. Raises ConfigError when it is missing or has fewer devices than tp_size.
    """
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise ConfigError(field="platform", value=platform, allowed=f"jax cannot start it: {error}") from error
    if not 1 <= tp_size <= len(devices):
        raise ConfigError(
            field="--tp-size", value=tp_size, allowed=f"1 to {len(devices)}, the {platform} devices there are"
        )
    return Mesh(np.array(devices[:tp_size]).reshape(1, tp_size), (DATA_AXIS, TENSOR_AXIS))
