"""What the tiers take of the memory that the KV pool is in, while the size of that pool is still open."""

from __future__ import annotations

import math
from dataclasses import dataclass

from app.config.server_args import ServerArgs
from app.errors import ConfigError

GB = 1e9  # of the settings


@dataclass(frozen=True, slots=True, kw_only=True)
class TierDemand:
    """All bytes are over all ranks."""

    host_share: float = 0.0  # of the KV pool's bytes, for a host pool in the same memory
    host_bytes: int = 0  # of such a host pool if its size was given
    staging_bytes: int = 0  # at most
    least_staging_bytes: int = 0  # staging is at most this and a part of the KV pool
    staging_part: int | None = None  # None where its size was given

    def fitting_pages(self, room_bytes: int, bytes_a_page: int) -> int:
        """Most pages of the KV pool, the padding page not counted, that fit beside all this."""
        left = room_bytes - self.host_bytes
        each = bytes_a_page + math.ceil(bytes_a_page * self.host_share)
        fitting = (left - self.staging_bytes) // each
        if self.staging_part is not None:
            capped = (left - self.least_staging_bytes) // (each + -(-bytes_a_page // self.staging_part))
            fitting = max(fitting, capped)
        return max(fitting - 1, 0)

    def staging_for(self, pool_bytes: int) -> int:
        """Of a KV pool of so many bytes."""
        if self.staging_part is None:
            return self.staging_bytes
        return min(self.staging_bytes, self.least_staging_bytes + pool_bytes // self.staging_part)


NO_DEMAND = TierDemand()


def asked_size(args: ServerArgs) -> tuple[str, float]:
    """The setting that the host pool has its size from."""
    if args.hicache_size is None:
        return "--hicache-ratio", args.hicache_ratio
    return "--hicache-size", args.hicache_size


def refused_beside_pool(args: ServerArgs, room_bytes: int, pool_bytes: int, demand: TierDemand) -> ConfigError:
    """For a KV pool that was asked for and would fit alone."""
    host_bytes = demand.host_bytes or int(pool_bytes * demand.host_share)
    staging = demand.staging_for(pool_bytes)
    field, value = ("--hicache-staging-size", args.hicache_staging_size) if not host_bytes else asked_size(args)
    return ConfigError(
        field=field,
        value=value,
        allowed=f"less: weights and a step leave {room_bytes / GB:.3f} GB, of which the KV pool takes "
        f"{pool_bytes / GB:.3f} GB, its host pool {host_bytes / GB:.3f} GB and copies {staging / GB:.3f} GB",
    )
