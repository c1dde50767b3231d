"""Choosing tokens on the device.

Order of a row's steps: logit bias; repetition, frequency and presence penalties; temperature; top_k; top_p; min_p;
then one draw. Temperature 0 is the argmax after bias and penalties.

Log-probabilities are those of the raw logits, before all of these, as vLLM reports them by default: they say what the
model thinks, not how the request wants to be sampled.

Nothing here sorts: the cut-off values of top_k and top_p are found by bisection over the bits of float32, 32 passes
over the logits, which cost a tenth of a sort of the vocabulary. Tokens that tie with the last one kept are kept.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from app.core.sampling import MAX_LOGPROBS, SamplingParams
from app.tpu.program import Program, from_host, replicated

_LOWEST = int(np.array(-np.inf, np.float32).view(np.int32)) ^ 0x7FFFFFFF  # -inf in the integer order of floats


HostOrDevice = jax.Array | np.ndarray


class Choice(enum.Enum):
    """The cheapest way of choosing that serves every row of a batch."""

    GREEDY = "greedy"  # every temperature is 0
    SAMPLE = "sample"  # temperatures only
    FILTERED = "filtered"  # some row has top_k, top_p or min_p


class Logprobs(enum.Enum):
    """How many log-probabilities a batch needs."""

    NONE = "none"
    CHOSEN = "chosen"
    TOP = "top"  # of the chosen token and of the MAX_LOGPROBS likeliest


@dataclass(frozen=True, slots=True)
class SamplingVariant:
    """What is compiled: one program for each variant and batch bucket. A batch pays only for what some row asks for."""

    choice: Choice = Choice.GREEDY
    logprobs: Logprobs = Logprobs.NONE

    @classmethod
    def covering(cls, params: Sequence[SamplingParams]) -> SamplingVariant:
        """The cheapest variant that serves all of these rows. O(rows)."""
        sampled = [each for each in params if each.temperature > 0]
        if any(each.top_k > 0 or each.top_p < 1 or each.min_p > 0 for each in sampled):
            choice = Choice.FILTERED
        else:
            choice = Choice.SAMPLE if sampled else Choice.GREEDY
        most = max((-1 if each.logprobs is None else each.logprobs for each in params), default=-1)
        logprobs = Logprobs.TOP if most > 0 else Logprobs.CHOSEN if most == 0 else Logprobs.NONE
        return cls(choice, logprobs)


class SamplingRows(NamedTuple):
    """One element a row, B rows; padding rows may hold anything finite."""

    temperature: HostOrDevice  # (B,) float32; 0 is greedy
    top_p: HostOrDevice  # (B,) float32; 1 keeps all
    top_k: HostOrDevice  # (B,) int32; below 1 keeps all
    min_p: HostOrDevice  # (B,) float32; 0 keeps all
    seeds: HostOrDevice  # (B, 2) uint32: upper and lower half of the request's 64-bit seed
    positions: HostOrDevice  # (B,) int32, of the token to be chosen: each (seed, position) is one independent draw


class PenaltyArrays(NamedTuple):
    """Per request row, R rows, whatever the sampler must remember about it."""

    output_counts: jax.Array  # (R, vocab_size) int32, times that each token was put out
    prompt_seen: jax.Array  # (R, vocab_size) bool
    bias: jax.Array  # (R, vocab_size) float32


class PenaltyRows(NamedTuple):
    """The penalties of a batch. A row without any has slot R (beyond the tables) and the neutral scalars 1, 0, 0."""

    tables: PenaltyArrays
    slots: HostOrDevice  # (B,) int32
    repetition: HostOrDevice  # (B,) float32
    frequency: HostOrDevice  # (B,) float32
    presence: HostOrDevice  # (B,) float32


class SampledTokens(NamedTuple):
    """k is MAX_LOGPROBS for Logprobs.TOP, else 0."""

    token_ids: jax.Array  # (B,) int32
    logprobs: jax.Array  # (B,) float32 of token_ids; 0 for Logprobs.NONE
    top_token_ids: jax.Array  # (B, k) int32, likeliest first
    top_logprobs: jax.Array  # (B, k) float32


def greedy_rows(num_rows: int) -> SamplingRows:
    """Rows that all take the likeliest token, in fresh host arrays."""
    floats, ints = np.zeros(num_rows, np.float32), np.zeros(num_rows, np.int32)
    seeds = np.zeros((num_rows, 2), np.uint32)
    return SamplingRows(temperature=floats, top_p=floats, top_k=ints, min_p=floats, seeds=seeds, positions=ints)


def split_seed(seed: int) -> tuple[int, int]:
    """A 64-bit seed as the two uint32 of SamplingRows.seeds."""
    return seed >> 32, seed & 0xFFFFFFFF


@partial(jax.jit, static_argnames="variant")
def sample(
    logits: jax.Array, rows: SamplingRows, penalties: PenaltyRows | None, *, variant: SamplingVariant
) -> SampledTokens:
    """Choose one token for each row of `logits`, (B, vocab_size) float32.

    A row's draw depends on its logits, its parameters, its seed and its position alone: not on its place in the batch,
    on the other rows or on the padding. `penalties` is None when no row has a penalty or a bias; rows that have none
    are not changed by it. Dispatches and returns at once; nothing is donated.
    """
    shaped = logits if penalties is None else _penalise(logits, penalties)
    token_ids = jnp.argmax(shaped, axis=-1).astype(jnp.int32)
    if variant.choice is not Choice.GREEDY:
        heated = _heat(shaped, rows.temperature)
        if variant.choice is Choice.FILTERED:
            heated = _filter(heated, rows)
        token_ids = jnp.where(rows.temperature > 0, _draw(heated, rows), token_ids)
    return _with_logprobs(logits, token_ids, variant.logprobs)


def _penalise(logits: jax.Array, penalties: PenaltyRows) -> jax.Array:
    """Repetition as in CTRL (arXiv:1909.05858): divides positive logits, multiplies negative ones."""
    counts, seen, bias = (table.at[penalties.slots].get(mode="fill", fill_value=0) for table in penalties.tables)
    repetition, frequency, presence = (
        column[:, None] for column in (penalties.repetition, penalties.frequency, penalties.presence)
    )
    logits = logits + bias
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen | (counts > 0), repeated, logits)
    return logits - frequency * counts.astype(jnp.float32) - jnp.where(counts > 0, presence, 0)


def _heat(logits: jax.Array, temperature: HostOrDevice) -> jax.Array:
    """Logits by temperature, the greatest of each row at 0, so that small temperatures cannot overflow."""
    temperature = jnp.where(temperature > 0, temperature, 1)[:, None]
    return (logits - logits.max(axis=-1, keepdims=True)) / temperature


def _draw(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """(B,) int32: one categorical draw a row, by a threefry key made of its seed and its position."""

    def draw_one(logits: jax.Array, seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), position)
        return jax.random.categorical(key, logits).astype(jnp.int32)

    return jax.vmap(draw_one)(logits, jnp.asarray(rows.seeds), jnp.asarray(rows.positions))


def _filter(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """top_k, then top_p of what is left, then min_p: -inf for what they drop. `logits` have their maximum at 0."""
    ordered = _ordered(logits)
    top_k = jnp.where(rows.top_k < 1, logits.shape[-1], rows.top_k)
    cutoff = _greatest(lambda bound: (ordered >= bound).sum(axis=-1) >= top_k, top_k.size)
    weights = jnp.where(ordered >= cutoff[:, None], jnp.exp(logits), 0)
    mass = weights.sum(axis=-1) * rows.top_p
    # Kept are the likeliest tokens up to the one that brings the mass to top_p: those above which it is not reached.
    beyond = _greatest(lambda bound: jnp.where(ordered >= bound, weights, 0).sum(axis=-1) >= mass, top_k.size)
    cutoff = jnp.where(rows.top_p < 1, jnp.maximum(cutoff, beyond), cutoff)
    kept = (ordered >= cutoff[:, None]) & (logits >= jnp.log(rows.min_p)[:, None])
    return jnp.where(kept, logits, -jnp.inf)


def _ordered(values: jax.Array) -> jax.Array:
    """int32 in the same order as the float32 `values`."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _greatest(holds: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """(num_rows,) int32: for each row the greatest bound in the order of `_ordered`, at most that of 0.0, that holds.

    `holds` takes (num_rows, 1) bounds and must be true below some bound and false above it.
    """

    def halve(_: int, span: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = span
        middle = low + (high - low + 1) // 2
        good = holds(middle[:, None])
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    low = jnp.full(num_rows, _LOWEST, jnp.int32)
    return jax.lax.fori_loop(0, 32, halve, (low, jnp.zeros_like(low)))[0]


def _with_logprobs(logits: jax.Array, token_ids: jax.Array, wanted: Logprobs) -> SampledTokens:
    num_rows = token_ids.size
    nothing = jnp.zeros((num_rows, 0), jnp.int32), jnp.zeros((num_rows, 0), jnp.float32)
    if wanted is Logprobs.NONE:
        return SampledTokens(token_ids, jnp.zeros(num_rows, jnp.float32), *nothing)
    total = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, token_ids[:, None], axis=-1)[:, 0] - total
    if wanted is Logprobs.CHOSEN:
        return SampledTokens(token_ids, chosen, *nothing)
    top, top_ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[-1]))
    return SampledTokens(token_ids, chosen, top_ids.astype(jnp.int32), top - total[:, None])


class PenaltyTables:
    """Owner of the PenaltyArrays of `num_rows` request rows: 9 bytes a row and token id, allocated on first use.

    A row's content means nothing until `set_row`; batches name only rows that were set since their request began.
    Every device of `mesh` holds them whole. Not thread-safe: one thread dispatches.
    """

    def __init__(self, num_rows: int, vocab_size: int, mesh: Mesh) -> None:
        self._abstract = _abstract_tables(num_rows, vocab_size, mesh)
        self._arrays: PenaltyArrays | None = None

    def arrays(self) -> PenaltyArrays:
        """The tables, for the PenaltyRows of one dispatch. Dead after the next `set_row` or `record`: ask again."""
        if self._arrays is None:
            self._arrays = jax.tree.map(
                lambda table: jnp.zeros(table.shape, table.dtype, device=table.sharding), self._abstract
            )
        return self._arrays

    def set_row(self, slot: int, output_counts: np.ndarray, prompt_seen: np.ndarray, bias: np.ndarray) -> None:
        """Begin a request in row `slot`: (vocab_size,) each; see `penalty_row`. Copies of them go to the device."""
        row = (output_counts.copy(), prompt_seen.copy(), bias.copy())  # jax may read them later than this call returns
        self._arrays = _set_row(self.arrays(), row, np.int32(slot))

    def record(self, slots: HostOrDevice, token_ids: jax.Array) -> None:
        """Count sampled tokens, (B,) int32 each, B >= 2. Slot `num_rows` is dropped: rows without penalties."""
        arrays = self.arrays()
        counts = _count(arrays.output_counts, slots, token_ids)
        self._arrays = arrays._replace(output_counts=counts)

    def close(self) -> None:
        """Drop the arrays; they are allocated anew, zeroed, if used again. Idempotent."""
        self._arrays = None


def penalty_row(
    token_ids: np.ndarray, prompt_length: int, logit_bias: Mapping[int, float], vocab_size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """-> (output_counts, prompt_seen, bias) for `PenaltyTables.set_row`, from all that a request knows of itself.

    token_ids: (n,) int32, the prompt and then earlier output; every id must be below vocab_size.
    """
    output_counts = np.bincount(token_ids[prompt_length:], minlength=vocab_size).astype(np.int32)
    prompt_seen = np.zeros(vocab_size, np.bool_)
    prompt_seen[token_ids[:prompt_length]] = True
    bias = np.zeros(vocab_size, np.float32)
    for token_id, value in logit_bias.items():
        bias[token_id] = value
    return output_counts, prompt_seen, bias


@partial(jax.jit, donate_argnums=0)
def _set_row(arrays: PenaltyArrays, row: tuple[jax.Array, ...], slot: jax.Array) -> PenaltyArrays:
    put = jax.lax.dynamic_update_index_in_dim
    return PenaltyArrays(*(put(table, line, slot, 0) for table, line in zip(arrays, row, strict=True)))


@partial(jax.jit, donate_argnums=0)
def _count(counts: jax.Array, slots: jax.Array, token_ids: jax.Array) -> jax.Array:
    return counts.at[slots, token_ids].add(1, mode="drop")


def _abstract_tables(num_rows: int, vocab_size: int, mesh: Mesh) -> PenaltyArrays:
    types = (jnp.int32, jnp.bool_, jnp.float32)
    return PenaltyArrays(*(replicated(mesh, (num_rows, vocab_size), dtype) for dtype in types))


def sampler_programs(*, num_rows: int, batch: int, vocab_size: int, mesh: Mesh) -> list[Program]:
    """`sample` at its cheapest and at its dearest, and what penalties add, for `batch` of `num_rows` rows."""
    logits = replicated(mesh, (batch, vocab_size), jnp.float32)
    rows = jax.tree.map(lambda column: from_host(column.shape, column.dtype), greedy_rows(batch))
    slots, column = from_host((batch,), jnp.int32), from_host((batch,), jnp.float32)
    tables = _abstract_tables(num_rows, vocab_size, mesh)
    row = tuple(from_host((vocab_size,), table.dtype) for table in tables)
    penalties = PenaltyRows(tables, slots, column, column, column)
    dearest = SamplingVariant(Choice.FILTERED, Logprobs.TOP)
    token_ids = replicated(mesh, (batch,), jnp.int32)
    return [
        Program(
            name="sample_greedy",
            function=sample,
            arguments=(logits, rows, None),
            statics={"variant": SamplingVariant()},
        ),
        Program(
            name="sample_everything",
            function=sample,
            arguments=(logits, rows, penalties),
            statics={"variant": dearest},
        ),
        Program(
            name="penalties_begin",
            function=_set_row,
            arguments=(tables, row, from_host((), jnp.int32)),
            donated=(tables,),
        ),
        Program(
            name="penalties_count",
            function=_count,
            arguments=(tables.output_counts, slots, token_ids),
            donated=(tables.output_counts,),
        ),
    ]
