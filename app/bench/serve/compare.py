"""Two runs side by side, if they sent the same in the same way."""

from __future__ import annotations

from dataclasses import dataclass

from app.bench.serve.failures import IncomparableError
from app.bench.serve.result import RunResult, Spread, Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One figure of two runs. ratio: second / first; None where one is missing or the first is 0."""

    name: str
    unit: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        return None if not self.first or self.second is None else self.second / self.first


def check_comparable(first: RunResult, second: RunResult, first_name: str, second_name: str) -> None:
    """Raise IncomparableError, naming all that differs, unless only the servers do. Their model must be the same, since
    another one has other tokens; cache type and page size may differ."""
    reasons = [
        f"{name} was not completed ({result.ending})"
        for name, result in ((first_name, first), (second_name, second))
        if result.ending != "complete"
    ]
    keys = dict.fromkeys((*first.settings, *second.settings))
    pairs = [(key.replace("_", " "), first.settings.get(key), second.settings.get(key)) for key in keys]
    pairs.append(("model", first.server.model, second.server.model))
    differing = [
        f"{name} is {one!r} in the first and {other!r} in the second" for name, one, other in pairs if one != other
    ]
    if not differing and first.digest != second.digest:
        differing.append(
            "the settings are the same, but the requests are not (other data, or another context length: "
            f"{first.server.context_length} and {second.server.context_length} tokens)"
        )
    if reasons or differing:
        raise IncomparableError(first=first_name, second=second_name, reasons=[*reasons, *differing])


def compare(first: RunResult, second: RunResult) -> list[Compared]:
    """Every figure of a summary, in a fixed order."""
    one, other = first.summary, second.summary
    times = (
        ("TTFT", one.ttft, other.ttft),
        ("ITL", one.itl, other.itl),
        ("TPOT", one.tpot, other.tpot),
        ("E2E", one.e2e, other.e2e),
    )
    rows = [row for name, a, b in times for row in _compare_times(name, a, b)]
    return rows + [
        Compared(name=name, unit=unit, first=a, second=b)
        for (name, unit, a), (_, _, b) in zip(_totals(one), _totals(other), strict=True)
    ]


def _compare_times(name: str, first: Spread | None, second: Spread | None) -> list[Compared]:
    one, other = _values(first), _values(second)
    return [
        Compared(name=f"{name} {figure}", unit=unit, first=one.get(figure), second=other.get(figure))
        for figure, unit in (("n", ""), ("mean", "ms"), ("p50", "ms"), ("p95", "ms"), ("p99", "ms"))
    ]


def _values(spread: Spread | None) -> dict[str, float]:
    if spread is None:
        return {}
    return {
        "n": spread.n,
        "mean": 1e3 * spread.mean,
        "p50": 1e3 * spread.p50,
        "p95": 1e3 * spread.p95,
        "p99": 1e3 * spread.p99,
    }


def _totals(summary: Summary) -> list[tuple[str, str, float | None]]:
    return [
        ("requests", "/ s", summary.requests_per_s),
        ("prompt tokens", "/ s", summary.prompt_tokens_per_s),
        ("output tokens", "/ s", summary.output_tokens_per_s),
        ("cached tokens", "", summary.cached_tokens),
        ("token hit rate", "%", _percent(summary.hit_rate)),
        ("ideal token hit rate", "%", _percent(summary.ideal_hit_rate)),
        ("measured / ideal", "%", _percent(summary.of_ideal)),
        ("requests completed", "", summary.completed),
        ("requests failed", "", summary.failed),
        ("requests not sent", "", summary.not_sent),
    ]


def _percent(rate: float | None) -> float | None:
    return None if rate is None else 100 * rate
