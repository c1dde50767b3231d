"""What can go wrong around a run, beside the failures of single requests, which are counted and not raised."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from app.errors import AppError

EXTRA_PACKAGES = ("httpx", "matplotlib")


class MissingExtraError(AppError):
    """A package of the optional extra is not installed."""

    def describe(self, *, package: str) -> str:  # type: ignore[override]
        return f"{package} is not installed: install the extra tpukv[bench] (`make bench-serve` does)"


class BenchServerError(AppError):
    """The server cannot be measured: it is not there, is no such server, or went away."""

    def describe(self, *, url: str, reason: str) -> str:  # type: ignore[override]
        return f"the server at {url} {reason}"


class IncomparableError(AppError):
    """Two results whose difference would say nothing about the servers."""

    def describe(self, *, first: str, second: str, reasons: Sequence[str]) -> str:  # type: ignore[override]
        return f"{first} and {second} cannot be compared: {'; '.join(reasons)}"


def require_extra() -> None:
    """Raise MissingExtraError before anything is measured, not when the picture is due."""
    for package in EXTRA_PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package=package)
