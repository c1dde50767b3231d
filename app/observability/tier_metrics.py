"""What Prometheus sees of the tiers below the device pool. Names are SGLang's where it has one.

Nothing is counted here: the tiers count, and whoever scrapes reads what they had at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Labels: TypeAlias = tuple[str, ...]
TierFigures: TypeAlias = Mapping[str, Mapping[Labels, float]]
"""Samples by labels, by the names of TIER_METRICS. What is left out has no sample."""


class TierMetric(NamedTuple):
    kind: Literal["counter", "gauge"]
    text: str
    labels: Labels = ()


TIER_METRICS: Mapping[str, TierMetric] = {
    "host_backup_tokens": TierMetric("counter", "Tokens copied from the device to the host"),
    "load_back_tokens": TierMetric("counter", "Tokens restored from the host to the device"),
    "backuped_tokens": TierMetric("counter", "Tokens that storage took, or had already"),
    "prefetched_tokens": TierMetric("counter", "Tokens brought from storage to the host"),
    "storage_lookup_tokens": TierMetric("counter", "Tokens that storage was asked for"),
    "storage_found_tokens": TierMetric("counter", "Tokens of those that it had"),
    "hicache_transfers": TierMetric("counter", "Transfers that ended", ("direction",)),
    "hicache_bytes": TierMetric("counter", "Bytes moved", ("direction",)),
    "hicache_seconds": TierMetric("counter", "Seconds of transfers, summed over those side by side", ("direction",)),
    "hicache_failures": TierMetric("counter", "Transfers that failed", ("direction", "reason")),
    "hicache_drops": TierMetric("counter", "What was not sent, or did not come", ("direction", "reason")),
    "hicache_restores_not_worth": TierMetric("counter", "Times that computing was expected to be quicker"),
    "hicache_waited_seconds": TierMetric("counter", "Seconds in which transfers were waited for, and no row ran"),
    "hicache_held_back_seconds": TierMetric("counter", "Seconds that requests waited for storage, over all of them"),
    "storage_outcomes": TierMetric("counter", "Keys that storage was asked about", ("operation", "outcome")),
    "hicache_transfers_in_flight": TierMetric("gauge", "Transfers under way", ("direction",)),
    "hicache_bytes_in_flight": TierMetric("gauge", "Bytes of copies between device and host under way"),
    "hicache_queue_length": TierMetric("gauge", "What waits to be sent", ("queue",)),
    "hicache_staging_bytes": TierMetric("gauge", "Device memory of copies under way"),
    "hicache_staging_peak_bytes": TierMetric("gauge", "The most that it was"),
    "hicache_hidden_ratio": TierMetric("gauge", "Part of the time of copies that lay behind steps, at least; 0 to 1"),
    "hicache_host_used_tokens": TierMetric("gauge", "Tokens of host pages that hold something"),
    "hicache_host_total_tokens": TierMetric("gauge", "Tokens that the host pool holds"),
    "storage_attached": TierMetric("gauge", "1 while a storage is attached"),
    "storage_breaker_open": TierMetric("gauge", "1 while a storage that failed is not asked"),
}


class TierCollector(Collector):
    """Exposes the figures that it was given last. Safe from any thread: figures are replaced whole."""

    def __init__(self, figures: TierFigures) -> None:
        self._figures = figures

    def measured(self, figures: TierFigures) -> None:
        self._figures = figures

    def collect(self) -> Iterator[Metric]:
        figures = self._figures
        for name, (kind, text, labels) in TIER_METRICS.items():
            family = _FAMILIES[kind](f"tpukv:{name}", text, labels=labels)
            for values, amount in figures.get(name, {}).items():
                family.add_metric(values, amount)
            yield family


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
