"""What one side sees of the other. Small protocols; nothing here has code.

Caches see `TokenAllocator` and `DevicePool`; scheduling sees `Detokenizer`; a runtime sees `ModelRunner`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from app.config.model_config import StateArray
from app.core.handles import CacheIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The shape of a KV pool. Pages 1..num_pages are usable; page 0 is padding and belongs to nobody."""

    num_pages: int
    page_size: int  # tokens
    num_layers: int
    num_kv_heads: int  # over all tensor-parallel ranks, after replication
    head_dim: int
    dtype: str  # element type as stored: "float32", "bfloat16", or "bfloat16_bits" (uint16 holding bfloat16)
    # Zeros stored beside every head and after every rank's heads, where an attention kernel needs whole tiles.
    extra_kv_heads: int = 0  # over all ranks
    extra_head_dim: int = 0
    arrays_per_layer: int = 2  # keys and values; 1 where both are read out of one latent (MLA), which every rank holds
    num_ranks: int = 1  # that share the heads, or hold a latent each

    @property
    def bytes_per_element(self) -> int:
        return 4 if self.dtype == "float32" else 2

    @property
    def stored_kv_heads(self) -> int:
        return self.num_kv_heads + self.extra_kv_heads

    @property
    def stored_head_dim(self) -> int:
        return self.head_dim + self.extra_head_dim

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values of every layer together, over all ranks. What each of them holds counts
        once: so many bytes are stored.
        """
        tokens = self.num_layers * self.page_size * self.stored_kv_heads * self.stored_head_dim
        return self.arrays_per_layer * tokens * self.bytes_per_element

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that one page takes of all ranks together: of a latent one copy each."""
        return self.page_bytes * (self.num_ranks if self.arrays_per_layer == 1 else 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """The shape of a pool of recurrent states.

    Along the axis of slots: 0 is never written and holds zeros, what a sequence begins with; 1..num_snapshots are
    snapshots; then come the running states, one for each request row: `running_slots`.
    """

    num_snapshots: int
    num_rows: int
    num_layers: int
    arrays: tuple[StateArray, ...]  # of each layer
    num_ranks: int = 1  # that share the arrays, or hold one each

    @property
    def num_slots(self) -> int:
        """The length of the axis of slots."""
        return 1 + self.num_snapshots + self.num_rows

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, every layer together, over all ranks. What each of them holds counts once."""
        return self.num_layers * sum(array.num_bytes for array in self.arrays)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory that one slot takes of all ranks together."""
        copies = (self.num_ranks if array.sharded_axis is None else 1 for array in self.arrays)
        return self.num_layers * sum(array.num_bytes * each for array, each in zip(self.arrays, copies, strict=True))

    def running_slots(self, rows: np.ndarray) -> np.ndarray:
        """Where the states of these request rows are: (n,) int32 to the same."""
        return rows + np.int32(1 + self.num_snapshots)


class DevicePool(Protocol):
    """The device pool as control may see it: its shape, never its arrays."""

    @property
    def spec(self) -> PoolSpec: ...


class TokenAllocator(Protocol):
    """Control's face of the page allocator. Memory of the control side only: no call here reaches a runtime.

    Allocation is not on this port: only `prepare_batch` allocates, and its answer names the pages.
    """

    @property
    def page_size(self) -> int: ...

    @property
    def capacity(self) -> int:
        """Usable pages: ids 1..capacity."""
        ...

    @property
    def identity(self) -> CacheIdentity:
        """The pool to which page ids belong now. When it changes, every page id from before means nothing."""
        ...

    def free(self, pages: np.ndarray) -> None:
        """Give pages back: (n,) int32. Ownership is checked at once; the pages are recorded for the next plan.

        Raises ForeignPageError or DoubleFreeError and changes nothing then. O(n).
        """
        ...

    def recorded_frees(self) -> np.ndarray:
        """(n,) int32: freed pages that no prepared batch has applied yet. Put them into the next plan."""
        ...

    def available(self) -> int:
        """Pages that the next prepare may hand out: free ones and recorded ones."""
        ...

    def free_page_ids(self) -> np.ndarray:
        """(n,) int32: pages that nobody holds. O(capacity); for the ledger, not for serving."""
        ...


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> np.ndarray:
        """(num_tokens,) int32; adds no token of its own; special tokens in the text are recognised."""
        ...

    def decode(self, token_ids: np.ndarray, *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, perhaps half a character; b"" for an id without a token."""
        ...

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str: ...


class DetokenizerStream(Protocol):
    """The text of one request, token by token. Concatenated deltas equal the decoding of all ids."""

    def push(self, token_ids: list[int]) -> str:
        """The text that has become final with these tokens; never half a character."""
        ...

    def flush(self) -> str:
        """What is left at the end, once."""
        ...


class Detokenizer(Protocol):
    def stream(self, *, skip_special_tokens: bool = True) -> DetokenizerStream: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowPages:
    """Where sliding-window layers find the tokens that this step's queries see, and write the step's own.

    page_table: (B, width) int32 page ids of the window pool. Column c holds page index first_pages[row] + c of the row.
    first_pages: (B,) int32.
    Device arrays.
    """

    page_table: Any
    first_pages: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """One token for each of B rows (B is a bucket; padding rows have length 0).

    token_ids: (B,) int32, the token whose KV is written by this step.
    lengths: (B,) int32, tokens in the row including this one; its position is length - 1; 0 marks padding.
    page_table: (B, max_pages) int32 page ids in token order; 0 where there is none.
    window: for models with sliding windows.
    state_slots: (B,) int32, for models with recurrent layers: slot of each row's running state, which the step reads
        and replaces; beyond the last slot for padding rows.
    Device arrays.
    """

    token_ids: Any
    lengths: Any
    page_table: Any
    window: WindowPages | None = None
    state_slots: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtendInputs:
    """A chunk of prompt for each of S rows, packed without gaps into T tokens (T and S are buckets).

    token_ids: (T,) int32, rows one after another; padding at the end.
    chunk_starts: (S,) int32, index of each row's first token in token_ids.
    chunk_lengths: (S,) int32, tokens of each row in this step; 0 marks a padding row.
    prefix_lengths: (S,) int32, tokens of the row whose KV is already in the pool.
    page_table: (S, max_pages) int32, covering prefix_lengths + chunk_lengths.
    max_chunk: the bucket that every chunk_length fits in, or the largest one, which stands for all longer chunks;
        static.
    window, state_slots: as in DecodeInputs, for S rows.
    Device arrays except max_chunk.
    """

    token_ids: Any
    chunk_starts: Any
    chunk_lengths: Any
    prefix_lengths: Any
    page_table: Any
    max_chunk: int
    window: WindowPages | None = None
    state_slots: Any = None


class ModelRunner(Protocol):
    """The model as a runtime calls it. Buffers are the pool's arrays; they are donated and come back replaced.

    A step begins from the row's running state as it is: whoever starts a row put zeros or a snapshot there before.

    Both calls write the new tokens' KV first and attend after, dispatch and return at once, and may raise what the
    device raised. Logits are (rows, vocab_size) float32: of each row's last token.
    """

    @property
    def vocab_size(self) -> int: ...

    def load(self) -> None:
        """Bring weights to the device. Idempotent."""
        ...

    def decode(self, buffers: Any, inputs: DecodeInputs) -> tuple[Any, Any]:
        """-> (buffers, logits (B, vocab_size))"""
        ...

    def extend(self, buffers: Any, inputs: ExtendInputs) -> tuple[Any, Any]:
        """-> (buffers, logits (S, vocab_size))"""
        ...

    def close(self) -> None:
        """Drop the weights."""
        ...
