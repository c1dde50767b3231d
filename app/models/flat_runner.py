"""A model over a flat pool, as a runtime calls it."""

from __future__ import annotations

from collections.abc import Callable

import jax

from app.config.model_config import ModelConfig
from app.core.ports import DecodeInputs, ExtendInputs
from app.errors import RuntimeClosedError
from app.models.flat_programs import FlatPrograms, FlatWeights
from app.models.weights_on_mesh import WeightsSource
from app.tpu.pool_layout import FlatKVBuffers


class FlatModelRunner:
    """A ModelRunner over a flat pool, for the models that FlatPrograms serves.

    Owns the weights, never the pool: its array is donated to every call and the replacement returned. Inputs must be
    device arrays, or numpy arrays that nobody changes afterwards. Not thread-safe: one thread dispatches.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights_source: WeightsSource,
        programs: FlatPrograms,
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """progress: told what is loaded, how far (0 to 1)."""
        self._config = config
        self._source = weights_source
        self._programs = programs
        self._progress = progress or (lambda what, fraction: None)
        self._weights: FlatWeights | None = None

    @property
    def vocab_size(self) -> int:
        return self._config.vocab_size

    def load(self) -> None:
        """Read every weight from the source and place its shards. Idempotent; waits for the copies."""
        if self._weights is None:
            self._weights = jax.block_until_ready(self._programs.load(self._source, self._progress))
            self._progress("weights", 1.0)

    def close(self) -> None:
        """Drop the weights; `load` brings them back. Idempotent."""
        self._weights = None

    def decode(self, buffers: FlatKVBuffers, inputs: DecodeInputs) -> tuple[FlatKVBuffers, jax.Array]:
        """-> (buffers, logits (B, vocab_size) float32). One token a row."""
        rows = (inputs.lengths, inputs.page_table)
        return self._programs.decode(self._loaded(), buffers, inputs.token_ids, *rows)

    def extend(self, buffers: FlatKVBuffers, inputs: ExtendInputs) -> tuple[FlatKVBuffers, jax.Array]:
        """-> (buffers, logits (S, vocab_size) float32 of each row's last token). Padding rows come last."""
        rows = (inputs.chunk_starts, inputs.chunk_lengths, inputs.prefix_lengths, inputs.page_table)
        max_chunk = self._programs.told_apart(inputs.max_chunk)
        return self._programs.extend(self._loaded(), buffers, inputs.token_ids, *rows, max_chunk=max_chunk)

    def _loaded(self) -> FlatWeights:
        if self._weights is None:
            raise RuntimeClosedError(action="run the model without its weights")
        return self._weights
