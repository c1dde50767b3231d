"""Every error this project raises on purpose.

    AppError
    |-- ConfigError(ValueError)            a setting cannot be served; raised before anything is built
    |   |-- UnknownCacheTypeError(LookupError)
    |   `-- CacheTypeConflictError
    |-- RegistrationError                  a cache type registered twice, or too late
    |-- RequestError(ValueError)           one request cannot be served as it is asked; the engine serves on
    |-- CapacityError                      a pool is full; waiting, evicting or retracting may help
    |   |-- OutOfPagesError
    |   `-- OutOfRequestSlotsError
    |-- OwnershipError                     somebody used what they do not own: a bug in the caller
    |   |-- DoubleFreeError
    |   |-- ForeignPageError
    |   |-- StaleHandleError
    |   `-- LockedPageError
    |-- IntegrityError                     a check_integrity() found a broken invariant: a bug of ours
    |-- BatchOrderError                    prepared batches executed twice or out of order
    |-- StepFailedError                    the device failed; the pool was lost and made anew
    |-- NodesFailedError                   the device failed and the pool lies on several nodes: it is gone for good
    `-- RuntimeClosedError

Errors take fields, not text, say what to do next, and survive pickling as their own class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class AppError(Exception):
    """Base of every error here. Subclasses take keyword fields only and build their text from them."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        super().__init__(self.describe(**fields))

    def describe(self, **fields: Any) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in fields.items())

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.fields)


def _rebuild(cls: type[AppError], fields: dict[str, Any]) -> AppError:
    return cls(**fields)


class ConfigError(AppError, ValueError):
    """A setting, or a pair of settings, that cannot be served."""

    def describe(self, *, field: str, value: object, allowed: str) -> str:
        return f"{field}={value!r} is not allowed: {allowed}"


class UnknownCacheTypeError(ConfigError, LookupError):
    def describe(self, *, name: str, known: Sequence[str]) -> str:
        return f"--cache-type={name!r} is not allowed: known cache types are {', '.join(known)}"


class CacheTypeConflictError(ConfigError):
    """Two settings that exclude one another, both named."""

    def describe(self, *, field: str, value: object, other_field: str, other_value: object, allowed: str) -> str:
        return f"{field}={value!r} cannot be combined with {other_field}={other_value!r}: {allowed}"


class RegistrationError(AppError):
    def describe(self, *, name: str, reason: str, known: Sequence[str]) -> str:
        return f"cache type {name!r}: {reason}; known cache types are {', '.join(known) or '(none)'}"


class RequestError(AppError, ValueError):
    """One request that cannot be served as asked."""

    def describe(self, *, field: str, value: object, allowed: str) -> str:
        return f"{field}={value!r} is not allowed: {allowed}"


class CapacityError(AppError):
    """A pool is full."""


class OutOfPagesError(CapacityError):
    def describe(self, *, need: int, free: int) -> str:
        return f"{need} pages are needed and {free} are free: evict, retract a request, or wait for one to finish"


class OutOfRequestSlotsError(CapacityError):
    def describe(self, *, need: int, free: int) -> str:
        return f"{need} request rows are needed and {free} are free: wait for a request to finish"


class OwnershipError(AppError):
    """Somebody used what they do not own."""


class DoubleFreeError(OwnershipError):
    def describe(self, *, pages: Sequence[int]) -> str:
        return f"pages {_head(pages)} are not held by anybody, so they cannot be freed (freed twice?)"


class ForeignPageError(OwnershipError):
    def describe(self, *, pages: Sequence[int], capacity: int) -> str:
        return f"pages {_head(pages)} are not of this pool: its page ids are 1..{capacity} (0 is the padding page)"


class StaleHandleError(OwnershipError):
    def describe(self, *, what: str, held: object, current: object) -> str:
        return f"{what} {held} is stale: the current one is {current}; match or admit again"


class LockedPageError(OwnershipError):
    def describe(self, *, pages: Sequence[int]) -> str:
        return f"pages {_head(pages)} are locked by a running request"


class IntegrityError(AppError):
    def describe(self, *, owner: str, broken: str) -> str:
        return f"{owner}: {broken}"


class BatchOrderError(AppError):
    def describe(self, *, batch_id: int, reason: str) -> str:
        return f"prepared batch {batch_id}: {reason}"


class StepFailedError(AppError):
    def describe(self, *, reason: str, generation: int) -> str:
        return f"the device failed during a step ({reason}); the KV pool was made anew as generation {generation}"


class NodesFailedError(AppError):
    def describe(self, *, reason: str, num_nodes: int) -> str:
        return (
            f"a step failed ({reason}), and the KV pool lies on {num_nodes} nodes, which cannot make it anew one by "
            "one: start all nodes again"
        )


class RuntimeClosedError(AppError):
    def describe(self, *, action: str) -> str:
        return f"{action}: the runtime of this container is closed; build a new container"


def _head(pages: Sequence[int], limit: int = 8) -> str:
    shown = ", ".join(str(int(page)) for page in pages[:limit])
    return f"[{shown}{', ...' if len(pages) > limit else ''}]"
