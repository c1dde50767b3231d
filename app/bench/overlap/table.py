"""The result of the overlap bench as a table, each figure beside its target."""

from __future__ import annotations

from typing import Any, NamedTuple


class Target(NamedTuple):
    """at_least: whether more is better."""

    key: str
    what: str
    limit: float
    at_least: bool

    def is_reached(self, value: float | None) -> bool:
        return value is not None and (value >= self.limit if self.at_least else value <= self.limit)


TARGETS = (
    Target("restore_hidden_share", "restore time behind steps", 0.80, True),
    Target("itl_ratio_p50", "inter-token p50, backups / none", 1.05, False),
    Target("itl_ratio_p99", "inter-token p99, backups / none", 1.10, False),
    Target("transfer_over_device_put", "tier's copies, against one bare device_put", 0.80, True),
    Target("ttft_l2_over_recompute", "first token, host hit / recompute", 0.25, False),
    Target("ttft_l3_over_recompute", "first token, storage hit / recompute", 0.40, False),
    Target("control_ratio", "control time a step, tiers on / off", 1.30, False),
)


def format_overlap_bench(result: dict[str, Any]) -> str:
    lines = [f"  {'':<44}{'measured':>10}{'target':>10}"]
    for target in TARGETS:
        value = result[target.key]
        sign = ">=" if target.at_least else "<="
        shown = "none" if value is None else f"{value:.3f}"
        mark = "" if target.is_reached(value) else "   missed"
        lines.append(f"  {target.what:<44}{shown:>10}{sign + f' {target.limit:.2f}':>10}{mark}")
    ttft, hits, itl = result["ttft_ms"], result["hit_share"], result["itl_ms"]
    lines += [
        "",
        f"first token of a prefix of {result['prefix_tokens']:,} tokens, ms: recomputed {ttft['recompute']:.1f}, "
        f"on the device {ttft['l1']:.1f}, on the host {ttft['l2']:.1f}, in storage {ttft['l3']:.1f}; "
        f"found {hits['l1']:.0%}, {hits['l2']:.0%}, {hits['l3']:.0%}",
        f"restored beside decodes: {result['restored_share']:.0%} of what was on the host; "
        f"{result['not_worth_restoring']} times computing was expected to be quicker",
        f"inter-token ms with backups and without: p50 {itl['with_p50']:.1f} / {itl['without_p50']:.1f}, "
        f"p99 {itl['with_p99']:.1f} / {itl['without_p99']:.1f}, at {result['backed_up_mb_per_s']:.0f} MB/s copied out",
        f"  the floor, as many bytes copied by a plain thread, over none: p50 {result['itl_floor_p50']:.2f}, "
        f"p99 {result['itl_floor_p99']:.2f}",
        f"copies of {result['copy_bytes'] / 1e6:.0f} MB, GB/s: "
        + ", ".join(f"{name.replace('_', ' ')} {rate:.2f}" for name, rate in result["copies_gb_per_s"].items()),
        f"against a bare put of the list of pages: {_shown(result['transfer_over_put_of_pages'])}",
        "control us a step: " + ", ".join(f"{arm} {us:.0f}" for arm, us in result["us_a_step"].items()),
        "  over off: " + ", ".join(f"{arm} {ratio:.2f}" for arm, ratio in result["ratios"].items()),
        f"scheduler's thread busy {_shown(result['scheduler_cpu_share'])} of the time, "
        f"no step running {_shown(result['idle_share'])} of it",
    ]
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
