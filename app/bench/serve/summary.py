"""From the rows of a run to its figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from app.bench.serve.result import RequestRow, Spread, Summary


def summarise(rows: Sequence[RequestRow], num_planned: int) -> Summary:
    """num_planned: requests that the workload has. O(rows and deltas)."""
    whole = [row for row in rows if row.failure is None]
    failures = Counter(row.failure for row in rows if row.failure is not None)
    duration_s = max(row.end_s for row in whole) - min(row.sent_s for row in rows) if whole else 0.0
    prompt_tokens = sum(row.prompt_tokens for row in whole)
    output_tokens = sum(row.completion_tokens for row in whole)
    cached_tokens = _total([row.cached_tokens for row in whole])
    hit_rate = _ratio(cached_tokens, prompt_tokens)
    ideal_hit_rate = _ratio(_total([row.ideal_cached_tokens for row in whole]), prompt_tokens)
    return Summary(
        completed=len(whole),
        failed=len(rows) - len(whole),
        not_sent=num_planned - len(rows),
        failures=dict(sorted(failures.items())),
        duration_s=duration_s,
        ttft=spread([row.delta_s[0] - row.sent_s for row in whole if row.delta_s]),
        itl=spread([gap for row in whole for gap in np.diff(row.delta_s)]),
        tpot=spread([per_token for row in whole if (per_token := _time_per_token(row)) is not None]),
        e2e=spread([row.end_s - row.sent_s for row in whole]),
        late=spread([row.sent_s - row.due_s for row in rows if row.turn == 0]),
        requests_per_s=_per_second(len(whole), duration_s),
        prompt_tokens_per_s=_per_second(prompt_tokens, duration_s),
        output_tokens_per_s=_per_second(output_tokens, duration_s),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
        hit_rate=hit_rate,
        ideal_hit_rate=ideal_hit_rate,
        of_ideal=None if hit_rate is None or not ideal_hit_rate else hit_rate / ideal_hit_rate,
    )


def spread(seconds: Sequence[float]) -> Spread | None:
    """None without samples. A percentile is a sample, never a value between two: p99 of 20 samples is the largest."""
    if not seconds:
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(seconds, (50, 95, 99), method="inverted_cdf"))
    return Spread(n=len(seconds), mean=float(np.mean(seconds)), p50=p50, p95=p95, p99=p99, max=float(np.max(seconds)))


def _time_per_token(row: RequestRow) -> float | None:
    """Seconds for each token after the first; events may hold several tokens, so gaps between events do not say it."""
    if row.completion_tokens < 2 or len(row.delta_s) < 2:
        return None
    return (row.delta_s[-1] - row.delta_s[0]) / (row.completion_tokens - 1)


def _total(counts: Sequence[int | None]) -> int | None:
    """None if one is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _ratio(part: int | None, whole: int) -> float | None:
    return None if part is None or not whole else part / whole


def _per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
