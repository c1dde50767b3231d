"""When conversations begin, if something else than the concurrency holds them back."""

from __future__ import annotations

import numpy as np

from app.bench.serve.conversation import Workload
from app.bench.serve.settings import TRACE_RATE, LoadSettings
from app.errors import ConfigError


def arrival_times(workload: Workload, load: LoadSettings, seed: int) -> list[float | None]:
    """Seconds after the start for each conversation, in order, from 0; None for those that nothing holds back.

    A rate is one of requests: conversations of n turns on average begin at rate / n a second, with exponentially
    distributed gaps that follow from `seed`. Raises ConfigError when the trace's times are asked for and missing.
    """
    count = len(workload.conversations)
    if load.rate == TRACE_RATE:
        own = [one.arrival_s for one in workload.conversations if one.arrival_s is not None]
        if len(own) < count:
            raise ConfigError(field="rate", value=load.rate, allowed="a workload with arrival times of its own")
        return [second * load.kept_time for second in own]
    if load.requests_per_second == 0.0:
        return [None] * count
    mean_gap_s = workload.num_requests / count / load.requests_per_second
    gaps = np.random.default_rng(seed).exponential(mean_gap_s, count)
    return [float(second) for second in np.cumsum(gaps) - gaps[0]]
