"""The boundary. Everything below owns device arrays and physical state; everything above plans in ints.

Two calls a step, whatever the batch size and whatever moved. Tested for every implementation by one contract suite.
"""

from __future__ import annotations

from typing import Protocol

from app.core.batch import BatchPlan, PreparedBatch, StepHandle
from app.core.handles import CacheIdentity


class RuntimeInterface(Protocol):
    """Owner of the pools, the request rows, the page table, the sampling state and the order of device work."""

    @property
    def identity(self) -> CacheIdentity:
        """The pool that page ids belong to now. Local memory of control's side, not a boundary call."""
        ...

    def open(self) -> None:
        """Load the weights, allocate the pool. Opening again after `close` gives a new generation: all is empty."""
        ...

    def close(self) -> None:
        """Wait for dispatched steps, then drop every array. Idempotent. Later calls raise RuntimeClosedError."""
        ...

    def prepare_batch(self, plan: BatchPlan) -> PreparedBatch:
        """Apply the plan's frees and releases and reserve what its rows need: everything, or nothing at all.

        Raises OutOfPagesError or OutOfRequestSlotsError; StaleHandleError for a handle, a page or an identity that is
        not current; OwnershipError for a plan that names a row twice; RequestError for a value that the model or a row
        cannot take. None of them leaves a trace. Cost: O(rows + pages and tokens named).
        """
        ...

    def execute_batch(self, prepared: PreparedBatch) -> StepHandle:
        """Dispatch and return at once. Prepared batches are executed once, in the order in which they were prepared.

        At most one earlier step may be un-waited-for. A device failure is told by the completion, not raised here,
        unless the pool lies on several nodes: then it is for good, and all calls, and the handle's `wait`, raise
        NodesFailedError.
        """
        ...

    def discard_batch(self, prepared: PreparedBatch) -> None:
        """Give back what `prepared` reserved (pages and admitted rows). Its frees, releases and rewrites stay."""
        ...
