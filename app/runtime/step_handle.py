"""A step that was dispatched on this process's devices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np

from app.core.batch import NO_TOKEN, BatchCompletion
from app.core.handles import CacheIdentity
from app.core.transfers import TransferEnd
from app.errors import AppError
from app.runtime.dispatch import SectionResult

_POLL_SECONDS = 0.0005
_DEVICE_ERRORS = (RuntimeError, ValueError)  # JAX's own are RuntimeErrors; a collective that fails may be a ValueError


class TransfersUnderWay(Protocol):
    """What moves between tiers, for a step that has nothing else to wait for."""

    def has_news(self) -> bool: ...

    def wait(self, timeout_s: float) -> None:
        """Until there is news, or so long."""
        ...


class LocalStepHandle:
    """StepHandle over device arrays. They are read once, when they are waited for, and then dropped.

    A step without rows may wait for transfers instead: it is done when there is news of one, or when its time is over.
    """

    def __init__(
        self,
        *,
        batch_id: int,
        num_rows: int,
        extend_samples: np.ndarray,
        identity: Callable[[], CacheIdentity],
        on_read: Callable[[LocalStepHandle], None],
        on_failure: Callable[[int, str], None],
        collect_ends: Callable[[], tuple[TransferEnd, ...]],
        moves: TransfersUnderWay,
        wait_s: float,
    ) -> None:
        """collect_ends: called once, when control reads the step; it may lose the pool, and this step with it.

        wait_s: how long this step waits for transfers, from now on; 0 for a step with rows.
        """
        self._batch_id = batch_id
        self._num_rows = num_rows
        self._extend_samples = extend_samples.copy()  # control may reuse its array before the step is read
        self._identity = identity
        self._on_read = on_read
        self._on_failure = on_failure
        self._collect_ends = collect_ends
        self._moves = moves
        self._waits_until = time.monotonic() + wait_s if wait_s > 0 else 0.0
        self._sections: list[SectionResult] = []
        self._failure: str | None = None
        self._fatal: AppError | None = None
        self._rows: BatchCompletion | None = None  # read, and not told yet
        self._completion: BatchCompletion | None = None

    @property
    def batch_id(self) -> int:
        return self._batch_id

    def started(self, sections: list[SectionResult]) -> None:
        """The runtime dispatched it."""
        self._sections = sections

    def failed(self, reason: str) -> None:
        """The runtime lost the pool that it ran on."""
        self._failure = reason
        self._sections = []

    def abandoned(self, error: AppError) -> None:
        """The runtime is over: whoever waits for this step gets `error`."""
        self._fatal = error
        self._sections = []

    def salvage(self) -> None:
        """Read it now, because a later step lost the pool: what this one produced stands, unless it failed as well."""
        try:
            self._rows = self._collect_rows()
        except _DEVICE_ERRORS as error:
            self.failed(_described(error))
        else:
            self._sections = []
            self._on_read(self)

    def done(self) -> bool:
        if self._rows is not None or self._completion is not None:
            return True
        if self._failure is not None or self._fatal is not None:
            return True
        if time.monotonic() < self._waits_until:
            return self._moves.has_news()
        arrays = [array for section in self._sections for array in section.sampled]
        return all(array.is_ready() for array in arrays)  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None) -> BatchCompletion:
        if self._completion is None:
            self._wait_for_transfers(timeout)
            if timeout is not None:
                self._wait_ready(timeout)
            self._completion = self._read()
        return self._completion

    def _wait_for_transfers(self, timeout: float | None) -> None:
        left = self._waits_until - time.monotonic()
        if left > 0 and not self.done():
            self._moves.wait(left if timeout is None else min(left, timeout))

    def _wait_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"step {self._batch_id} has not finished within {timeout} s")
            time.sleep(_POLL_SECONDS)

    def _read(self) -> BatchCompletion:
        """The rows, and what has ended by now; all rows failed if either loses the pool."""
        if self._rows is not None:
            return self._rows  # the pool was lost since: what ended by that is told by the step that lost it
        rows = self._read_rows()
        ends = self._collect_ends()
        if self._fatal is not None:
            raise self._fatal
        if rows is None or self._failure is not None:
            rows = self._failed_rows()
        self._sections = []
        self._on_read(self)
        return replace(rows, transfers=ends)

    def _read_rows(self) -> BatchCompletion | None:
        if self._failure is None and self._fatal is None:
            try:
                return self._collect_rows()
            except _DEVICE_ERRORS as error:
                self._on_failure(self._batch_id, _described(error))
        if self._fatal is not None:
            raise self._fatal
        return None

    def _failed_rows(self) -> BatchCompletion:
        return BatchCompletion(
            batch_id=self._batch_id,
            identity=self._identity(),
            token_ids=np.full(self._num_rows, NO_TOKEN, np.int32),
            logprobs=np.zeros(self._num_rows, np.float32),
            top_token_ids=np.zeros((self._num_rows, 0), np.int32),
            top_logprobs=np.zeros((self._num_rows, 0), np.float32),
            failure=self._failure,
        )

    def _collect_rows(self) -> BatchCompletion:
        """Rows of all sections, one after another, on the host."""
        width = max((section.sampled.top_token_ids.shape[1] for section in self._sections), default=0)
        token_ids = np.full(self._num_rows, NO_TOKEN, np.int32)
        logprobs = np.zeros(self._num_rows, np.float32)
        top_token_ids = np.zeros((self._num_rows, width), np.int32)
        top_logprobs = np.zeros((self._num_rows, width), np.float32)
        begin = 0
        for section in self._sections:
            end = begin + section.num_rows
            sampled = [np.asarray(array)[: section.num_rows] for array in section.sampled]
            columns = sampled[2].shape[1]
            token_ids[begin:end], logprobs[begin:end] = sampled[0], sampled[1]
            top_token_ids[begin:end, :columns], top_logprobs[begin:end, :columns] = sampled[2], sampled[3]
            begin = end
        token_ids[self._num_rows - self._extend_samples.size :][~self._extend_samples] = NO_TOKEN
        return BatchCompletion(
            batch_id=self._batch_id,
            identity=self._identity(),
            token_ids=token_ids,
            logprobs=logprobs,
            top_token_ids=top_token_ids,
            top_logprobs=top_logprobs,
        )


def _described(error: Exception) -> str:
    """What the device says."""
    return f"{type(error).__name__}: {error}"
