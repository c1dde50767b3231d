"""TPUs that need not be there: the compiler knows them by name, and compiles for them on any machine.

Needs the extra `tpu` (the compiler is in libtpu); no TPU, and no access to one.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from app.errors import ConfigError
from app.tpu.mesh import DATA_AXIS, TENSOR_AXIS

_GIB = 1 << 30
# What the compiler lets one device use, as it says itself when a program asks for more.
_MEMORY_GIB = {"v5e": 15.75, "v6e": 31.25, "v5p": 95.74, "tpu7x": 94.75}
# Without a TPU the library would look for one, on the network, and let only one process in.
_OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A topology of one kind of chip, such as v5e:2x2."""

    name: str
    memory_bytes: int  # that programs may use, of one device
    devices: tuple[jax.Device, ...]

    def mesh(self, tp_size: int) -> Mesh:
        """A (1, tp_size) mesh over its first devices. ConfigError when it has fewer."""
        if not 1 <= tp_size <= len(self.devices):
            allowed = f"1 to {len(self.devices)}, the devices of {self.name}"
            raise ConfigError(field="--tp-size", value=tp_size, allowed=allowed)
        return Mesh(np.array(self.devices[:tp_size]).reshape(1, tp_size), (DATA_AXIS, TENSOR_AXIS))


def find_target(name: str) -> Target:
    """The target of that name, "<chip>:<shape>". ConfigError for one that the compiler does not know.

    The first call of a process loads libtpu, which may take a second.
    """
    chip = name.partition(":")[0]
    if chip not in _MEMORY_GIB:
        raise ConfigError(field="--target", value=name, allowed=f"a topology of {', '.join(_MEMORY_GIB)}, as v5e:2x2")
    if importlib.util.find_spec("libtpu") is None:
        allowed = "none here: the TPU compiler is not installed; the extra `tpu` of this package brings it"
        raise ConfigError(field="--target", value=name, allowed=allowed)
    for variable, value in _OFFLINE.items():
        os.environ.setdefault(variable, value)
    try:
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except (RuntimeError, ValueError) as error:
        raise ConfigError(field="--target", value=name, allowed=f"what the TPU compiler knows: {error}") from error
    memory = int(_MEMORY_GIB[chip] * _GIB)
    return Target(name=name, memory_bytes=memory, devices=tuple(topology.devices))
