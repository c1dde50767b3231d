"""The eviction policies by name."""

from __future__ import annotations

from collections.abc import Callable

from app.caches.tree.policies.hit_density import HitDensityOrder
from app.caches.tree.policies.lru import LruOrder
from app.caches.tree.policies.order import EvictionOrder
from app.caches.tree.policies.ranked import lfu_order, priority_order, slru_order
from app.errors import ConfigError

EVICTION_ORDERS: dict[str, Callable[[], EvictionOrder]] = {
    "lru": LruOrder,
    "lfu": lfu_order,
    "slru": slru_order,
    "priority": priority_order,
    "hit_density": HitDensityOrder,
}


def make_eviction_order(policy: str) -> EvictionOrder:
    """A new, empty order. ConfigError for a policy that does not exist."""
    try:
        return EVICTION_ORDERS[policy]()
    except KeyError:
        raise ConfigError(
            field="eviction_policy", value=policy, allowed=f"one of {', '.join(EVICTION_ORDERS)}"
        ) from None
