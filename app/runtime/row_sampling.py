"""What the next sample of each request row depends on, kept beside the rows.

On the host, by row: the sampling parameters. On the device: the last token of each row, which feeds the next step, and
the penalty tables. A draw depends on (seed, position) alone, so chunking, retraction and batch mates never change it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.core.batch import Admission
from app.core.sampling import SamplingParams
from app.models.sampler import (
    PenaltyRows,
    PenaltyTables,
    SampledTokens,
    SamplingRows,
    SamplingVariant,
    penalty_row,
    sample,
    split_seed,
)
from app.tpu.program import Program, from_host, replicated

_GREEDY = SamplingParams()


class RowSampling:
    """Sampling state of `num_rows` request rows. Owned by the runtime; single-threaded."""

    def __init__(self, *, num_rows: int, vocab_size: int, mesh: Mesh) -> None:
        self._num_rows = num_rows
        self._vocab_size = vocab_size
        self._mesh = mesh
        self._params: list[SamplingParams] = [_GREEDY] * num_rows
        self._temperature = np.zeros(num_rows, np.float32)
        self._top_p = np.ones(num_rows, np.float32)
        self._top_k = np.full(num_rows, -1, np.int32)
        self._min_p = np.zeros(num_rows, np.float32)
        self._seeds = np.zeros((num_rows, 2), np.uint32)
        self._penalties = np.tile(np.array([1, 0, 0], np.float32), (num_rows, 1))  # repetition, frequency, presence
        self._reshaped = np.zeros(num_rows, np.bool_)
        self._plain = np.ones(num_rows, np.bool_)  # greedy, no log-probabilities
        self._tables = PenaltyTables(num_rows, vocab_size, mesh)
        self._last_tokens: Any = None

    def open(self) -> None:
        sharding = NamedSharding(self._mesh, PartitionSpec())
        self._last_tokens = jnp.zeros(self._num_rows, jnp.int32, device=sharding)

    def close(self) -> None:
        self._tables.close()
        self._last_tokens = None

    def reset(self) -> None:
        self.close()
        self.open()

    def admit(self, slot: int, admission: Admission) -> None:
        """The row begins a request. Penalty tables travel to the device only if the request reshapes logits."""
        params = admission.sampling
        self._params[slot] = params
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = params.top_k
        self._min_p[slot] = params.min_p
        self._seeds[slot] = split_seed(params.seed or 0)
        self._penalties[slot] = params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        self._reshaped[slot] = params.reshapes_logits
        self._plain[slot] = params.temperature == 0 and params.logprobs is None
        if params.reshapes_logits:
            row = penalty_row(admission.token_ids, admission.prompt_length, params.logit_bias, self._vocab_size)
            self._tables.set_row(slot, *row)

    def last_tokens(self) -> Any:
        """(num_rows,) int32 device array, for the next step's feed. Dead after the next `choose`."""
        return self._last_tokens

    def choose(self, logits: Any, slots: np.ndarray, positions: np.ndarray, samples: np.ndarray) -> SampledTokens:
        """Sample rows and remember their tokens. Dispatches and returns at once.

        logits: (B, vocab_size), B a bucket; slots, positions (of the tokens to be chosen), samples: (n <= B,); rows
        with `samples` False get a token that nothing remembers.
        """
        bucket = logits.shape[0]
        targets = np.full(bucket, self._num_rows, np.int32)  # out of range: dropped
        targets[: slots.size][samples] = slots[samples]
        sampled = sample(
            logits, self._rows(slots, positions, bucket), self._penalty_rows(targets), variant=self._variant(slots)
        )
        self._last_tokens = _remember(self._last_tokens, targets, sampled.token_ids)
        if self._reshaped[slots].any():
            counted = np.where(self._is_reshaped(targets), targets, self._num_rows).astype(np.int32)
            self._tables.record(counted, sampled.token_ids)
        return sampled

    def _variant(self, slots: np.ndarray) -> SamplingVariant:
        if self._plain[slots].all():
            return SamplingVariant()
        return SamplingVariant.covering([self._params[slot] for slot in slots.tolist()])

    def _rows(self, slots: np.ndarray, positions: np.ndarray, bucket: int) -> SamplingRows:
        """Fresh arrays each time: jax may read them after this call has returned."""

        def padded(column: np.ndarray) -> np.ndarray:
            rows = np.zeros((bucket, *column.shape[1:]), column.dtype)
            rows[: slots.size] = column
            return rows

        return SamplingRows(
            temperature=padded(self._temperature[slots]),
            top_p=padded(self._top_p[slots]),
            top_k=padded(self._top_k[slots]),
            min_p=padded(self._min_p[slots]),
            seeds=padded(self._seeds[slots]),
            positions=padded(positions.astype(np.int32)),
        )

    def _penalty_rows(self, targets: np.ndarray) -> PenaltyRows | None:
        reshaped = self._is_reshaped(targets)
        if not reshaped.any():
            return None
        columns = np.tile(np.array([1, 0, 0], np.float32), (targets.size, 1))
        columns[reshaped] = self._penalties[targets[reshaped]]
        return PenaltyRows(
            tables=self._tables.arrays(),
            slots=np.where(reshaped, targets, self._num_rows).astype(np.int32),
            repetition=columns[:, 0].copy(),
            frequency=columns[:, 1].copy(),
            presence=columns[:, 2].copy(),
        )

    def _is_reshaped(self, targets: np.ndarray) -> np.ndarray:
        inside = targets < self._num_rows
        return inside & self._reshaped[np.where(inside, targets, 0)]


@partial(jax.jit, donate_argnums=0)
def _remember(last_tokens: jax.Array, slots: jax.Array, token_ids: jax.Array) -> jax.Array:
    return last_tokens.at[slots].set(token_ids, mode="drop")


@jax.jit
def feed(last_tokens: jax.Array, slots: jax.Array) -> jax.Array:
    """(B,) int32: the token that each row's next step computes."""
    return jnp.take(last_tokens, slots, mode="clip")


def sampling_programs(*, num_rows: int, batch: int, mesh: Mesh) -> list[Program]:
    """What one section of a step of `batch` rows dispatches beside the model and the sampler."""
    last_tokens = replicated(mesh, (num_rows,), np.int32)
    slots, sampled = from_host((batch,), np.int32), replicated(mesh, (batch,), np.int32)
    return [
        Program(name="feed", function=feed, arguments=(last_tokens, slots)),
        Program(name="remember", function=_remember, arguments=(last_tokens, slots, sampled), donated=(last_tokens,)),
    ]
