"""What crosses the boundary: a plan going down, a prepared batch and a completion coming up. Ints and numpy only.

    control: BatchPlan  --prepare_batch-->  PreparedBatch  --execute_batch-->  StepHandle  --wait-->  BatchCompletion

Everything is flat arrays, one element a row, so that a plan for 256 requests costs what a plan for one costs.
Rows of a plan are numbered decode rows first, then extend rows; PreparedBatch and BatchCompletion use that order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from app.core.handles import CacheExtentRef, CacheIdentity, Generation, RequestRuntimeHandle
from app.core.sampling import SamplingParams
from app.core.transfers import NO_TRANSFERS, NOTHING_PREPARED, PreparedTransfers, TransferEnd, TransferPlan
from app.errors import StaleHandleError

NO_TOKEN = -1


def _no_ints() -> np.ndarray:
    return np.empty(0, np.int32)


def _no_bools() -> np.ndarray:
    return np.empty(0, np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request that gets a row with this plan.

    prefix_pages: (n,) int32, cached pages that the row starts with; they stay the cache's.
    prompt_length: tokens before the first output token; the rest of what the row is extended with is earlier output
        (a request admitted again after retraction).
    token_ids: every token known so far, (prompt + earlier output,) int32. The runtime reads it only when
        `sampling.reshapes_logits`.
    sampling: with `seed` set.
    prefix_window_pages: for a model with sliding windows: as many as prefix_pages, of the window pool; 0 where the row
        needs none.
    state: for a model with recurrent layers: the snapshot, of exactly the prefix's tokens, that the row's running state
        begins as a copy of; 0 begins from nothing.
    """

    prefix_pages: np.ndarray
    prompt_length: int
    token_ids: np.ndarray
    sampling: SamplingParams
    prefix_window_pages: np.ndarray = field(default_factory=_no_ints)
    state: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PageRewrite:
    """From the next step on, the row reads `pages` at page indexes first_page_index.. instead of what it had."""

    slot: int
    generation: int
    first_page_index: int
    pages: np.ndarray  # (n,) int32
    window_pages: np.ndarray = field(default_factory=_no_ints)  # (n,) int32 with sliding windows; 0 where none


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPlan:
    """One step, as control wants it. `identity` stamps every page id in it; the runtime compares it once.

    Applied in this order: frees, releases, rewrites, admissions, then pages for every row. No row is named twice.
    A plan without rows is legal.

    free_pages: (f,) int32, from TokenAllocator.recorded_frees(); free_window_pages, free_states: the same for the
        window pool and for snapshots.
    published_*: (p,) int32, rows whose first published_counts pages are the cache's from now on; a row's window pages
        are the runtime's to retire only beyond these.
    snapshots: (rows,) bool, rows whose state is to be kept as it is after this step; empty for none.
    transfers: what is to move between tiers beside the step; see core/transfers.py.
    release_*: (r,) int32, rows that end; their pages are not touched by this.
    decode_positions: (d,) int32, position whose KV this step writes; the row's last token is fed.
    extend_slots: (e,) int32; -1 - i is the row of admissions[i], and then its generation is not read.
    extend_starts: (e,) int32, tokens whose KV is there before.
    extend_lengths: (e,) int32, tokens of this chunk, at least one.
    extend_samples: (e,) bool, whether the chunk's end is the row's end: a token is sampled.
    extend_token_ids: (sum of extend_lengths,) int32, rows one after another.
    """

    identity: CacheIdentity
    free_pages: np.ndarray = field(default_factory=_no_ints)
    free_window_pages: np.ndarray = field(default_factory=_no_ints)
    free_states: np.ndarray = field(default_factory=_no_ints)
    release_slots: np.ndarray = field(default_factory=_no_ints)
    release_generations: np.ndarray = field(default_factory=_no_ints)
    rewrites: tuple[PageRewrite, ...] = ()
    published_slots: np.ndarray = field(default_factory=_no_ints)
    published_generations: np.ndarray = field(default_factory=_no_ints)
    published_counts: np.ndarray = field(default_factory=_no_ints)
    admissions: tuple[Admission, ...] = ()
    decode_slots: np.ndarray = field(default_factory=_no_ints)
    decode_generations: np.ndarray = field(default_factory=_no_ints)
    decode_positions: np.ndarray = field(default_factory=_no_ints)
    extend_slots: np.ndarray = field(default_factory=_no_ints)
    extend_generations: np.ndarray = field(default_factory=_no_ints)
    extend_starts: np.ndarray = field(default_factory=_no_ints)
    extend_lengths: np.ndarray = field(default_factory=_no_ints)
    extend_samples: np.ndarray = field(default_factory=_no_bools)
    extend_token_ids: np.ndarray = field(default_factory=_no_ints)
    snapshots: np.ndarray = field(default_factory=_no_bools)
    transfers: TransferPlan = NO_TRANSFERS

    @property
    def num_rows(self) -> int:
        return self.decode_slots.size + self.extend_slots.size


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedBatch:
    """What prepare_batch reserved, and what is left. The only way by which control learns a page id.

    admitted_slots, admitted_generations: (a,) int32, the row of each admission, in order.
    page_offsets: (rows + 1,) int32; row i gained pages[page_offsets[i]:page_offsets[i + 1]], to be appended to its
        own, and with sliding windows the same of window_pages.
    snapshot_slots: (rows,) int32, where the snapshots that the plan asked for will be; 0 for a row that gets none.
        Empty for a model without recurrent layers. Control holds them from now on.
    transfers: where the plan's transfers will be.
    """

    batch_id: int
    identity: CacheIdentity
    admitted_slots: np.ndarray
    admitted_generations: np.ndarray
    page_offsets: np.ndarray
    pages: np.ndarray
    pages_left: int
    slots_left: int
    window_pages: np.ndarray = field(default_factory=_no_ints)
    window_pages_left: int = 0
    snapshot_slots: np.ndarray = field(default_factory=_no_ints)
    states_left: int = 0
    transfers: PreparedTransfers = NOTHING_PREPARED

    def handle(self, admission: int) -> RequestRuntimeHandle:
        """The row of admissions[admission] of the plan; give it back with `BatchPlanBuilder.release`."""
        return RequestRuntimeHandle(
            self.identity.runtime_id,
            int(self.admitted_slots[admission]),
            Generation(int(self.admitted_generations[admission])),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCompletion:
    """What a step produced. Rows in the plan's order.

    token_ids: (rows,) int32, NO_TOKEN where the row did not sample.
    logprobs: (rows,) float32 of the sampled token; 0 where the row did not ask for it.
    top_token_ids, top_logprobs: (rows, k) int32 / float32, k the largest `logprobs` asked for in the batch (0 often).
    failure: None, or why every row of this step failed. Then the pool is lost: `identity` is the new pool's, and every
        older page id, handle and extent is refused.
    transfers: every transfer whose end was noticed since the last completion, of whichever plan.
    """

    batch_id: int
    identity: CacheIdentity
    token_ids: np.ndarray
    logprobs: np.ndarray
    top_token_ids: np.ndarray
    top_logprobs: np.ndarray
    failure: str | None = None
    transfers: tuple[TransferEnd, ...] = ()


class StepHandle(Protocol):
    """A dispatched step. Asking it is not a boundary call."""

    @property
    def batch_id(self) -> int: ...

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self, timeout: float | None = None) -> BatchCompletion:
        """The completion; blocks until the step has run. Raises TimeoutError after `timeout` seconds. Idempotent."""
        ...


class BatchPlanBuilder:
    """Collects one step's intents and makes the plan. Page ids that belong to another identity are refused."""

    def __init__(self, identity: CacheIdentity) -> None:
        self.identity = identity
        self._fields: dict[str, Any] = {}
        self._releases: list[tuple[int, int]] = []
        self._rewrites: list[PageRewrite] = []
        self._admissions: list[Admission] = []
        self._extends: list[tuple[int, int, int, int, bool]] = []
        self._chunks: list[np.ndarray] = []

    def free(self, pages: np.ndarray, window_pages: np.ndarray | None = None, states: np.ndarray | None = None) -> None:
        """What to give back: everything that each allocator has recorded."""
        self._fields["free_pages"] = pages
        if window_pages is not None:
            self._fields["free_window_pages"] = window_pages
        if states is not None:
            self._fields["free_states"] = states

    def release(self, handle: RequestRuntimeHandle) -> None:
        """The row ends. StaleHandleError for a row of another runtime."""
        if handle.runtime_id != self.identity.runtime_id:
            raise StaleHandleError(what="request row", held=tuple(handle), current=tuple(self.identity))
        self._releases.append((handle.slot_id, handle.generation))

    def rewrite(self, rewrite: PageRewrite) -> None:
        self._rewrites.append(rewrite)

    def publish(self, published: dict[tuple[int, int], int]) -> None:
        """(slot, generation) of rows -> how many of their first pages are the cache's now."""
        places = np.array([(*row, count) for row, count in published.items()], np.int32).reshape(-1, 3)
        self._fields.update(
            published_slots=places[:, 0], published_generations=places[:, 1], published_counts=places[:, 2]
        )

    def admit(
        self,
        prefix: CacheExtentRef,
        token_ids: np.ndarray,
        prompt_length: int,
        sampling: SamplingParams,
        prefix_window_pages: np.ndarray | None = None,
        state: int = 0,
    ) -> int:
        """-> the slot number by which `extend` names the new row in this plan (negative)."""
        prefix.check(self.identity)
        self._admissions.append(
            Admission(
                prefix_pages=prefix.pages(),
                prompt_length=prompt_length,
                token_ids=token_ids,
                sampling=sampling,
                prefix_window_pages=_no_ints() if prefix_window_pages is None else prefix_window_pages,
                state=state,
            )
        )
        return -len(self._admissions)

    def snapshot(self, rows: np.ndarray) -> None:
        """(rows,) bool over decode rows, then extends: whose state to keep as it is after this step."""
        self._fields["snapshots"] = rows

    def transfer(self, transfers: TransferPlan) -> None:
        """What moves between tiers beside the step."""
        self._fields["transfers"] = transfers

    def decode(self, slots: np.ndarray, generations: np.ndarray, positions: np.ndarray) -> None:
        """All decode rows of the step at once, (d,) int32 each."""
        self._fields.update(decode_slots=slots, decode_generations=generations, decode_positions=positions)

    def extend(self, slot: int, generation: int, start: int, chunk: np.ndarray, *, samples: bool) -> None:
        """One row's next prompt chunk, (n,) int32; `samples` when it reaches the end of what the row knows."""
        self._extends.append((slot, generation, start, chunk.size, samples))
        self._chunks.append(chunk)

    def build(self) -> BatchPlan:
        fields = self._fields
        if self._releases:
            releases = np.array(self._releases, np.int32)
            fields.update(release_slots=releases[:, 0], release_generations=releases[:, 1])
        if self._extends:
            extends = np.array(self._extends, np.int32)
            fields.update(
                extend_slots=extends[:, 0],
                extend_generations=extends[:, 1],
                extend_starts=extends[:, 2],
                extend_lengths=extends[:, 3],
                extend_samples=extends[:, 4].astype(np.bool_),
                extend_token_ids=np.concatenate(self._chunks).astype(np.int32, copy=False),
            )
        return BatchPlan(
            identity=self.identity,
            rewrites=tuple(self._rewrites),
            admissions=tuple(self._admissions),
            **fields,
        )
