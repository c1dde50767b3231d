"""What is compiled before requests are taken, and what is left for when it is needed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import structlog
from jax.errors import JaxRuntimeError

from app.caches.tiers.ports import CacheTiers
from app.config.server_args import Warmup, WarmupLevel
from app.errors import ConfigError
from app.runtime.buckets import PowersOfTwo, ReachableShapes
from app.runtime.local import LocalRuntime
from app.scheduling.limits import SchedulerLimits

_log = structlog.get_logger(__name__)


def level_of_server(warmup: Warmup, platform: str) -> WarmupLevel:
    """On CPU "auto" leaves steps out: decode steps alone take a minute or two there, and most runs meet few of them."""
    if warmup != "auto":
        return warmup
    return "decode" if platform == "tpu" else "copies"


def level_of_batch(warmup: Warmup) -> WarmupLevel:
    """Of commands that end once their own prompts are answered: those compile less than every shape."""
    return "copies" if warmup == "auto" else warmup


def warm_up(
    runtime: LocalRuntime, level: WarmupLevel, limits: SchedulerLimits, tiers: CacheTiers
) -> Iterator[tuple[str, float]]:
    """-> what is compiled next, and the fraction done; each step is taken when the iterator goes on.

    tiers: told how fast copies are.

    Raises ConfigError when the device's memory does not suffice, and whatever else the device raises.
    """
    started, steps = time.monotonic(), 0
    try:
        for what, fraction in runtime.warm_up(level, limits.chunk_tokens):
            yield f"compiling: {what}", fraction
            steps += 1
    except JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            field="--warmup",
            value=level,
            allowed="what the device has memory for; lower --mem-fraction-static, --max-total-tokens or "
            f"--max-running-requests: {error}",
        ) from error
    rate = runtime.restored_bytes_per_s()
    if rate is not None:
        tiers.note_copies(restored_bytes_per_s=rate)
    if steps:
        _log.info("warmed_up", level=level, steps=steps, seconds=round(time.monotonic() - started, 1))


def reachable_shapes(page_size: int, max_pages: int, limits: SchedulerLimits) -> ReachableShapes:
    return ReachableShapes(
        buckets=PowersOfTwo(page_size=page_size, max_pages=max_pages),
        num_rows=limits.max_running_requests,
        chunk_tokens=limits.chunk_tokens,
    )


def warmup_facts(level: WarmupLevel, shapes: ReachableShapes, *, has_tiers: bool) -> dict[str, list[str]]:
    """What a server compiles at its start, and what when a request first needs it."""
    copies = ["copies between tiers"] if has_tiers else []
    decoding = [f"decode steps of {len(shapes.decodes())} shapes", "sampling by temperature, top_k, top_p, min_p"]
    others = [f"prompts of {len(shapes.extends())} shapes", "log-probabilities", "penalties and logit_bias"]
    at_start = {
        "none": [],
        "copies": copies,
        "decode": copies + decoding,
        "all": copies + decoding + others,
    }[level]
    later = [part for part in copies + decoding + others if part not in at_start]
    return {"compiled_at_start": at_start, "compiled_when_needed": later}
