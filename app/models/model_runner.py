"""Models on a device mesh over arrays of their own for every layer, as a runtime calls them."""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from app.config.model_config import ModelConfig
from app.core.ports import DecodeInputs, ExtendInputs, PoolSpec
from app.errors import RuntimeClosedError
from app.models.decoder_programs import DecoderPrograms, DecoderWeights, StepRows
from app.models.steps import DecodeRows, ExtendRows, window_table
from app.models.weights_on_mesh import WeightsSource
from app.tpu.hybrid_buffers import HybridBuffers
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.pool_layout import KVBuffers

NO_WINDOW = KVBuffers((), ())


class HybridModelRunner:
    """A ModelRunner over HybridBuffers, for every family that has a decoder.

    Owns the weights, never the pools: their arrays are donated to every call and the replacements returned. Inputs must
    be device arrays, or numpy arrays that nobody changes afterwards. Not thread-safe: one thread dispatches.
    Compiles for each new combination of batch bucket, page-table widths and chunk bucket.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights_source: WeightsSource,
        mesh: Mesh,
        spec: HybridSpec,
        dtype: str = "float32",
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        """dtype: of weights and activations, "float32" or "bfloat16". progress: told what is loaded, how far (0 to 1).

        Raises ConfigError when the mesh cannot share out the model or a pool is not of this model's shape.
        """
        self._config = config
        self._source = weights_source
        self._progress = progress or (lambda what, fraction: None)
        self._programs = DecoderPrograms(config, mesh, spec, dtype)
        self._weights: DecoderWeights | None = None

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

    def decode(self, buffers: HybridBuffers, inputs: DecodeInputs) -> tuple[HybridBuffers, jax.Array]:
        """-> (buffers, logits (B, vocab_size) float32). B >= 2; one token a row."""
        weights, programs = self._loaded(), self._programs
        own = DecodeRows(inputs.lengths, inputs.page_table)
        rows = StepRows(own, window_table(inputs.window), inputs.state_slots)
        hidden = programs.embed(weights.embedding, inputs.token_ids)
        written = []
        for group in programs.groups:
            held = programs.buffers_of(buffers, group)
            part, hidden = group.decode(held, weights.layers[group.layers], hidden, rows)
            written.append(part)
        return _together(written), programs.logits(weights.head, weights.final_norm, hidden)

    def extend(self, buffers: HybridBuffers, inputs: ExtendInputs) -> tuple[HybridBuffers, jax.Array]:
        """-> (buffers, logits (S, vocab_size) float32 of each row's last token). T >= 2."""
        weights, programs = self._loaded(), self._programs
        own = ExtendRows(inputs.chunk_starts, inputs.chunk_lengths, inputs.prefix_lengths, inputs.page_table)
        rows = StepRows(own, window_table(inputs.window), inputs.state_slots)
        hidden = programs.embed(weights.embedding, inputs.token_ids)
        written = []
        for group in programs.groups:
            held = programs.buffers_of(buffers, group)
            part, hidden = group.extend(held, weights.layers[group.layers], hidden, rows, max_chunk=inputs.max_chunk)
            written.append(part)
        return _together(written), programs.last_logits(weights.head, weights.final_norm, hidden, own)

    def _loaded(self) -> DecoderWeights:
        if self._weights is None:
            raise RuntimeClosedError(action="run the model without its weights")
        return self._weights


class LlamaModelRunner:
    """A ModelRunner over KVBuffers, for models whose every layer has full attention to keys and values.

    What HybridModelRunner says holds here too.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights_source: WeightsSource,
        mesh: Mesh,
        pool_spec: PoolSpec,
        dtype: str = "float32",
        progress: Callable[[str, float], None] | None = None,
    ) -> None:
        self._runner = HybridModelRunner(config, weights_source, mesh, HybridSpec(full=pool_spec), dtype, progress)

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    def load(self) -> None:
        self._runner.load()

    def close(self) -> None:
        self._runner.close()

    def decode(self, buffers: KVBuffers, inputs: DecodeInputs) -> tuple[KVBuffers, jax.Array]:
        """-> (buffers, logits (B, vocab_size) float32). B >= 2; one token a row."""
        held, logits = self._runner.decode(HybridBuffers(buffers, NO_WINDOW, ()), inputs)
        return held.full, logits

    def extend(self, buffers: KVBuffers, inputs: ExtendInputs) -> tuple[KVBuffers, jax.Array]:
        """-> (buffers, logits (S, vocab_size) float32 of each row's last token). T >= 2."""
        held, logits = self._runner.extend(HybridBuffers(buffers, NO_WINDOW, ()), inputs)
        return held.full, logits


def _together(parts: list[HybridBuffers]) -> HybridBuffers:
    """The buffers of all groups, in order."""
    full, window = (
        KVBuffers(sum((kv.keys for kv in kind), ()), sum((kv.values for kv in kind), ()))
        for kind in ([part.full for part in parts], [part.window for part in parts])
    )
    return HybridBuffers(full, window, sum((part.states for part in parts), ()))
