"""Where the data of a workload is."""

from __future__ import annotations

from pathlib import Path

from app.bench.serve.settings import WorkloadSettings
from app.errors import ConfigError

CHECKOUT = Path(__file__).parents[3]

_IN_CHECKOUT = {
    "mooncake": "tests/data/mooncake_sample.jsonl",
    "agent": "benchmarks/data/swe_agent",
    "mtbench": "benchmarks/data/mt_bench/question.jsonl",
}


def data_path(settings: WorkloadSettings, checkout: Path = CHECKOUT) -> Path:
    """The data that was named, else the copy in `checkout`. Raises ConfigError if it is not there."""
    own = checkout / _IN_CHECKOUT[settings.workload]
    if settings.data is None and not own.exists():
        raise ConfigError(
            field="data",
            value=None,
            allowed=f"the path of the data of {settings.workload}: this installation has no copy of it "
            f"({_IN_CHECKOUT[settings.workload]} of the repository)",
        )
    path = own if settings.data is None else settings.data
    if not path.exists():
        raise ConfigError(field="data", value=str(path), allowed="a path that exists")
    return path
