"""Fake models whose pace, or whose words, a test decides. Their outputs are otherwise those of `FakeModelRunner`."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dependency_injector import providers

from app.core.ports import ModelRunner
from app.providers.testing import Override
from app.tpu.cpu_fake import FakeModelRunner
from tests.support.engine import VOCAB_SIZE

# Nothing is measured by it: a test that gets here has failed, and must not hang.
PATIENCE_S = 60.0


def model_runner(runner: ModelRunner) -> dict[str, Override]:
    """Overrides that put `runner` in the model's place."""
    return {"model_runner": lambda _: providers.Object(runner)}


class HeldRunner(FakeModelRunner):
    """Between `hold` and `release` no step goes through, so that the engine stands still with whatever it has."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self._open = threading.Event()
        self._open.set()
        self._stuck = threading.Event()

    def hold(self) -> None:
        self._stuck.clear()
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def wait_until_stuck(self) -> None:
        """Until the engine wants a step that it does not get."""
        assert self._stuck.wait(PATIENCE_S), "the engine asked for no step"

    def extend(self, buffers: Any, inputs: Any) -> Any:
        if not self._open.is_set():
            self._stuck.set()
            assert self._open.wait(PATIENCE_S), "nobody released the model"
        return super().extend(buffers, inputs)


class SlowRunner(FakeModelRunner):
    """Takes its time for each step, so that a request of many tokens is still running when a test looks."""

    def __init__(self, seconds: float) -> None:
        super().__init__(VOCAB_SIZE)
        self._seconds = seconds

    def extend(self, buffers: Any, inputs: Any) -> Any:
        time.sleep(self._seconds)
        return super().extend(buffers, inputs)


class ScriptedRunner(FakeModelRunner):
    """Says what it was told to, greedily: after prompts of `prompt_tokens` tokens the first of `tokens`, and so on."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self._prompt_tokens = 0
        self._script = np.zeros(1, np.int32)

    def say(self, prompt_tokens: int, tokens: Sequence[int]) -> None:
        """For requests to come. At its end the script stays with its last token."""
        self._prompt_tokens = prompt_tokens
        self._script = np.array(tokens, np.int32)

    def extend(self, buffers: Any, inputs: Any) -> Any:
        buffers, logits = super().extend(buffers, inputs)
        lengths = np.asarray(inputs.prefix_lengths) + np.asarray(inputs.chunk_lengths)
        places = np.clip(lengths - self._prompt_tokens, 0, self._script.size - 1)
        return buffers, jax.device_put(_certain(self._script[places]), logits.sharding)


def _certain(tokens: np.ndarray) -> jax.Array:
    """(n, VOCAB_SIZE) logits that leave no doubt about `tokens`, (n,) int32."""
    return jnp.asarray(np.where(np.arange(VOCAB_SIZE) == tokens[:, None], np.float32(16), np.float32(0)))
