"""The device pool as a runtime uses it."""

from __future__ import annotations

from typing import Any, Protocol


class LentPool(Protocol):
    """The device pool as the dispatcher uses it."""

    def take(self) -> Any: ...

    def put(self, buffers: Any) -> None: ...


class OwnedPool(LentPool, Protocol):
    """The device pool as its owner uses it."""

    def open(self) -> None: ...

    def close(self) -> None: ...

    def reset(self) -> None: ...

    @property
    def num_nodes(self) -> int:
        """Processes that hold a share of it."""
        ...
