"""The device mesh: axes "data" (1 for now) and "tensor".

With several nodes (processes that jax.distributed has joined) the tensor axis runs over all of them, node after node:
each node drives its own stretch of it and every node runs the same programs in the same order.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from app.errors import CacheTypeConflictError, ConfigError

DATA_AXIS = "data"
TENSOR_AXIS = "tensor"


def make_mesh(tp_size: int, platform: str, num_nodes: int = 1) -> Mesh:
    """A (1, tp_size) mesh over the first tp_size / num_nodes devices of `platform` ("cpu", "tpu") of every node.

    Starts the backend of that platform. Raises ConfigError when it is missing, when a node has too few devices, or when
    this process was not joined with num_nodes - 1 others.
    """
    try:
        devices = jax.devices(platform)
    except RuntimeError as error:
        raise ConfigError(field="platform", value=platform, allowed=f"jax cannot start it: {error}") from error
    num_joined = jax.process_count(platform)
    if num_joined != num_nodes:
        raise ConfigError(field="--nnodes", value=num_nodes, allowed=f"{num_joined}, the processes that were joined")
    by_node = [[device for device in devices if device.process_index == node] for node in range(num_nodes)]
    fewest = min(len(own) for own in by_node)
    if not 1 <= tp_size <= fewest * num_nodes:
        there_are = f"{fewest} on each of {num_nodes} nodes" if num_nodes > 1 else f"the {platform} devices there are"
        raise ConfigError(field="--tp-size", value=tp_size, allowed=f"1 to {fewest * num_nodes}, {there_are}")
    if tp_size % num_nodes:
        raise CacheTypeConflictError(
            field="--tp-size",
            value=tp_size,
            other_field="--nnodes",
            other_value=num_nodes,
            allowed="a multiple of the number of nodes",
        )
    used = [own[: tp_size // num_nodes] for own in by_node]
    return Mesh(np.array(used).reshape(1, tp_size), (DATA_AXIS, TENSOR_AXIS))


def tp_rank_of(mesh: Mesh) -> int:
    """The place of this process's first device on the tensor axis."""
    return [device.process_index for device in mesh.devices.flat].index(jax.process_index())


def num_nodes_of(mesh: Mesh) -> int:
    """Processes that drive the mesh's devices."""
    return len({device.process_index for device in mesh.devices.flat})
