"""What memory is really free once the weights are there, and whether the KV pool fits it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import Mesh

from app.config.server_args import ServerArgs
from app.errors import ConfigError
from app.providers import hybrid
from app.providers.host_sizing import HostSize, Specs
from app.providers.sizing import host_memory_bytes
from app.providers.tier_demand import NO_DEMAND, TierDemand
from app.tpu.mesh import num_nodes_of

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")  # version 2
_GB = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomCheck:
    """Called between loading the weights and allocating the pool. All bytes are over all ranks."""

    args: ServerArgs
    specs: Specs  # of the pool's kinds
    bytes_a_page: int  # of a page with all that it needs beside it
    step_bytes: int
    mem_fraction: float  # in effect
    free_bytes: Callable[[], int]
    demand: TierDemand = NO_DEMAND
    host_size: HostSize | None = None

    def __call__(self) -> None:
        """Raises ConfigError, with the numbers, unless what is free holds the pool, a step and the tiers."""
        free = self.free_bytes()
        pool_bytes = hybrid.pool_bytes(*self.specs)
        tier_bytes = 0 if self.host_size is None else self.host_size.bytes_beside_pool
        spare = free - (pool_bytes + self.step_bytes + tier_bytes)
        if spare >= 0:
            return
        self._refuse_snapshots(spare, free)
        tokens = self.demand.fitting_pages(free - self.step_bytes, self.bytes_a_page) * self.args.page_size
        tiers = f", the tiers below it {tier_bytes / _GB:.2f} GB" if tier_bytes else ""
        asked = self.args.max_total_tokens
        field, value = ("--mem-fraction-static", self.mem_fraction) if asked is None else ("--max-total-tokens", asked)
        raise ConfigError(
            field=field,
            value=value,
            allowed=f"less: with the weights loaded {free / _GB:.2f} GB are free, the KV pool takes "
            f"{pool_bytes / _GB:.2f} GB{tiers} and a step {self.step_bytes / _GB:.2f} GB; state "
            f"--max-total-tokens, at most {tokens}, or a lower --mem-fraction-static",
        )

    def _refuse_snapshots(self, spare: int, free: int) -> None:
        """Where fewer of the snapshots that were asked for would do."""
        asked, states = self.args.max_recurrent_snapshots, self.specs.states
        if asked is None or states is None:
            return
        fitting = asked + spare // states.held_bytes
        if fitting < 1:
            return
        raise ConfigError(
            field="--max-recurrent-snapshots",
            value=asked,
            allowed=f"at most {fitting}, of {states.held_bytes / _GB:.3f} GB each: with the weights loaded "
            f"{free / _GB:.2f} GB are free, which the rest of the KV pool and a step need too",
        )


def free_memory(mesh: Mesh) -> Callable[[], int]:
    """-> what tells the bytes that are free now, over all ranks: as if other nodes had as much as this one."""
    own = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    if own[0].platform == "cpu":
        return lambda: num_nodes_of(mesh) * free_host_memory_bytes()
    return lambda: mesh.size * min(_free_on(device) for device in own)


def free_host_memory_bytes() -> int:
    """What this process may still take: of the machine, and within its cgroup's limit. Files that are only cached are
    given back by the system when memory is asked for, and count as free.
    """
    free = [host_memory_bytes()]
    for read in (_machine, _cgroup):
        try:
            free.append(read())
        except (OSError, ValueError, KeyError):
            continue  # not Linux, no such cgroup version, or no limit
    return min(free)


def _machine() -> int:
    return 1024 * int(_fields(_MEMINFO)["MemAvailable:"])


def _cgroup() -> int:
    limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
    return limit - used + int(_fields(_CGROUP / "memory.stat")["inactive_file"])


def _fields(path: Path) -> dict[str, str]:
    """Lines of a name and a number."""
    return {name: number for name, number, *_ in map(str.split, path.read_text().splitlines())}


def _free_on(device: jax.Device) -> int:
    stats = device.memory_stats()
    return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
