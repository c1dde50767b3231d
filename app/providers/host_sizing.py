"""Sizes of the host pool and of what goes between it and the device. Arithmetic only.

All bytes are of all ranks together: what each of them holds, such as latents, counts for each, since a host page is as
the device's is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.core.ports import PoolSpec, StateSpec
from app.core.sliding_window import pages_seen
from app.core.transfers import OfEachPool, PageCounts, TierLimits
from app.errors import ConfigError
from app.models.layers.attention_choice import AttentionChoice, AttentionKind
from app.providers.sizing import host_memory_bytes, snapshot_interval
from app.providers.tier_demand import GB, NO_DEMAND, TierDemand, asked_size

STAGING_PART = 8  # of the KV pool, at most, if nobody gave a size
GROUP = 8  # pages that one program moves
_HOST_FRACTION = 0.7  # of a host's memory where the device has its own; the rest is for whoever else is there
_MAX_PAGES = 2**31 - 1  # page ids are int32


class Specs(NamedTuple):
    """The shapes of a model's pools; None for those that it has not."""

    pages: PoolSpec
    window_pages: PoolSpec | None
    states: StateSpec | None


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSize:
    """The host pool, and the device memory that copies may take."""

    counts: PageCounts
    limits: TierLimits
    is_beside_pool: bool  # whether the host pool is in the memory that the KV pool is in

    @property
    def num_bytes(self) -> int:
        """Of the host pool when it is full."""
        return self.limits.num_bytes(self.counts)

    @property
    def bytes_beside_pool(self) -> int:
        """Of the memory that the KV pool is in."""
        return self.limits.staging_bytes + (self.num_bytes if self.is_beside_pool else 0)


def tier_demand(
    args: ServerArgs,
    model: ModelConfig,
    platform: str,
    attention: AttentionChoice,
    one_of_each: Specs,
    chunk_tokens: int,
) -> TierDemand:
    """one_of_each: the pools' shapes, of one page each. ConfigError for staging that is too small, and for pages that
    cannot be copied alone.

    Only the CPU's host pool is in the memory that the KV pool is in.
    """
    if not args.enable_hierarchical_cache:
        return NO_DEMAND
    _check_page_size(args, attention)
    page_bytes = bytes_of_each(one_of_each)
    least = _least_counts(args, model, one_of_each)
    least_bytes = _num_bytes(least, page_bytes)
    asked = args.hicache_staging_size
    if asked is not None and asked * GB < least_bytes:
        raise ConfigError(
            field="--hicache-staging-size",
            value=asked,
            allowed=f"{least_bytes / GB:.4f} or more: that much of a prefix is moved in one piece",
        )
    on_cpu = platform == "cpu"
    given = args.hicache_size
    host_share = args.hicache_ratio if on_cpu and given is None else 0.0
    host_bytes = int(given * GB) if on_cpu and given is not None else 0
    if asked is not None:
        return TierDemand(host_share=host_share, host_bytes=host_bytes, staging_bytes=int(asked * GB))
    group = _num_bytes(least._replace(pages=max(least.pages, GROUP)), page_bytes)
    chunk_pages = -(-chunk_tokens // args.page_size)
    chunks = _num_bytes(PageCounts(2 * chunk_pages, 2 * chunk_pages, 2), page_bytes)
    return TierDemand(
        host_share=host_share,
        host_bytes=host_bytes,
        staging_bytes=max(chunks, group),
        least_staging_bytes=group,
        staging_part=STAGING_PART,
    )


def host_size(
    args: ServerArgs,
    model: ModelConfig,
    platform: str,
    device: Specs,
    demand: TierDemand,
) -> HostSize | None:
    """None without tiers. device: the shapes of its pools. ConfigError, with the numbers, if it cannot be.

    The pools are on the host in the proportions that they have on the device, but hold what one request needs.
    """
    if not args.enable_hierarchical_cache:
        return None
    page_bytes = bytes_of_each(device)
    spec, window, states = device
    on_device = PageCounts(
        spec.num_pages, 0 if window is None else window.num_pages, 0 if states is None else states.num_snapshots
    )
    device_bytes = _num_bytes(on_device, page_bytes)
    ratio = args.hicache_ratio if args.hicache_size is None else args.hicache_size * GB / max(device_bytes, 1)
    least = _least_counts(args, model, device)
    counts = PageCounts(*(max(int(ratio * there), few) for there, few in zip(on_device, least, strict=True)))
    if max(counts) > _MAX_PAGES:
        raise _refused(args, f"less: it makes a pool of {max(counts)} pages, and ids go up to {_MAX_PAGES}")
    limits = TierLimits(
        page_bytes=page_bytes,
        staging_bytes=demand.staging_for(device_bytes),
        copy_deadline_s=args.hicache_copy_deadline,
    )
    size = HostSize(counts=counts, limits=limits, is_beside_pool=platform == "cpu")
    if args.hicache_size is not None and size.num_bytes > args.hicache_size * GB:
        needed = device_bytes * max(few / there for few, there in zip(least, on_device, strict=True) if few)
        raise _refused(args, f"{needed / GB:.4f} or more: so much holds one request, in the KV pool's proportions")
    return size


def host_size_here(
    args: ServerArgs, model: ModelConfig, platform: str, device: Specs, demand: TierDemand
) -> HostSize | None:
    """The same, refused as well where this host has too little memory for it."""
    size = host_size(args, model, platform, device, demand)
    usable = int(host_memory_bytes() * _HOST_FRACTION)
    # What is in the device's memory was looked at when the KV pool got its size.
    if size is not None and not size.is_beside_pool and size.num_bytes > usable:
        made = f"{size.num_bytes / GB:.2f} GB of host memory, of which {usable / GB:.2f} GB may be used"
        raise _refused(args, f"less: it makes a pool of {made}")
    return size


def bytes_of_each(specs: Specs) -> OfEachPool[int]:
    """What one page of each pool takes, on the device as on the host; 0 where there is none."""
    return OfEachPool(*(0 if spec is None else spec.held_bytes for spec in specs))


def _check_page_size(args: ServerArgs, attention: AttentionChoice) -> None:
    """tests/tpu/test_page_sizes.py compiles what is refused and what is not."""
    if args.page_size == 1 and attention.kind is AttentionKind.GATHER:
        raise ConfigError(
            field="--page-size",
            value=args.page_size,
            allowed="2 or more with --enable-hierarchical-cache: for this model's heads a TPU lays a pool of pages of "
            "one token out so that copying one page copies all of them",
        )


def _least_counts(args: ServerArgs, model: ModelConfig, specs: Specs) -> PageCounts:
    """What makes one prefix usable, as far as it is moved in one piece: to the next snapshot where there are any."""
    interval = snapshot_interval(args, model) or args.page_size
    kept = 0
    if specs.window_pages is not None and model.sliding_window is not None:
        kept = pages_seen(1, model.sliding_window, args.page_size) + 1
    return PageCounts(-(-interval // args.page_size), kept, 0 if specs.states is None else 1)


def _refused(args: ServerArgs, allowed: str) -> ConfigError:
    field, value = asked_size(args)
    return ConfigError(field=field, value=value, allowed=allowed)


def _num_bytes(counts: PageCounts, page_bytes: OfEachPool[int]) -> int:
    return sum(count * each for count, each in zip(counts, page_bytes, strict=True))
