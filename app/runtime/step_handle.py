"""A step that was dispatched on this process's devices."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from app.core.batch import NO_TOKEN, BatchCompletion
from app.core.handles import CacheIdentity
from app.errors import AppError
from app.runtime.dispatch import SectionResult

_POLL_SECONDS = 0.0005
_DEVICE_ERRORS = (RuntimeError, ValueError)  # JAX's own are RuntimeErrors; a collective that fails may be a ValueError


class LocalStepHandle:
    """StepHandle over device arrays. They are read once, when they are waited for, and then dropped."""

    def __init__(
        self,
        *,
        batch_id: int,
        num_rows: int,
        extend_samples: np.ndarray,
        identity: Callable[[], CacheIdentity],
        on_read: Callable[[LocalStepHandle], None],
        on_failure: Callable[[int, str], None],
    ) -> None:
        self._batch_id = batch_id
        self._num_rows = num_rows
        self._extend_samples = extend_samples.copy()  # control may reuse its array before the step is read
        self._identity = identity
        self._on_read = on_read
        self._on_failure = on_failure
        self._sections: list[SectionResult] = []
        self._failure: str | None = None
        self._fatal: AppError | None = None
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
            self._completion = self._collect()
        except _DEVICE_ERRORS as error:
            self.failed(_described(error))
        else:
            self._sections = []
            self._on_read(self)

    def done(self) -> bool:
        if self._completion is not None or self._failure is not None or self._fatal is not None:
            return True
        arrays = [array for section in self._sections for array in section.sampled]
        return all(array.is_ready() for array in arrays)  # type: ignore[attr-defined]

    def wait(self, timeout: float | None = None) -> BatchCompletion:
        if self._completion is None:
            if timeout is not None:
                self._wait_ready(timeout)
            self._completion = self._read()
            self._sections = []
            self._on_read(self)
        return self._completion

    def _wait_ready(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self.done():
            if time.monotonic() >= deadline:
                raise TimeoutError(f"step {self._batch_id} has not finished within {timeout} s")
            time.sleep(_POLL_SECONDS)

    def _read(self) -> BatchCompletion:
        if self._failure is None and self._fatal is None:
            try:
                return self._collect()
            except _DEVICE_ERRORS as error:
                self._on_failure(self._batch_id, _described(error))
        if self._fatal is not None:
            raise self._fatal
        return BatchCompletion(
            batch_id=self._batch_id,
            identity=self._identity(),
            token_ids=np.full(self._num_rows, NO_TOKEN, np.int32),
            logprobs=np.zeros(self._num_rows, np.float32),
            top_token_ids=np.zeros((self._num_rows, 0), np.int32),
            top_logprobs=np.zeros((self._num_rows, 0), np.float32),
            failure=self._failure,
        )

    def _collect(self) -> BatchCompletion:
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
