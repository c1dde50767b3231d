"""Drives a HybridModelRunner as a runtime would, one call at a time, over pools and page tables of its own."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from app.config.model_config import Component, ModelConfig
from app.config.parallel import padded_kv_heads
from app.core.ports import DecodeInputs, ExtendInputs, PoolSpec, StateSpec, WindowPages
from app.core.sliding_window import first_seen_page, pages_seen
from app.models.model_runner import HybridModelRunner
from app.tpu.hybrid_buffers import HybridBuffers
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.lent_arrays import zeros
from app.tpu.mesh import make_mesh

POISON = 1e4
SNAPSHOTS = 2


def hybrid_spec(
    config: ModelConfig, *, page_size: int, num_pages: int, num_rows: int = 1, tp_size: int = 1, dtype: str = "float32"
) -> HybridSpec:
    """Of the pools that this model needs, `num_pages` in each."""

    def pool(component: Component) -> PoolSpec | None:
        num_layers = len(config.layers_with(component))
        if not num_layers:
            return None
        latent = config.latent_kv
        return PoolSpec(
            num_pages=num_pages,
            page_size=page_size,
            num_layers=num_layers,
            num_kv_heads=1 if latent else padded_kv_heads(config.num_heads, config.num_kv_heads, tp_size),
            head_dim=config.head_dim,
            dtype=dtype,
            arrays_per_layer=1 if latent else 2,
        )

    recurrent = len(config.layers_with(Component.RECURRENT))
    states = StateSpec(num_snapshots=SNAPSHOTS, num_rows=num_rows, num_layers=recurrent, arrays=config.recurrent_state)
    return HybridSpec(full=pool(Component.FULL), window=pool(Component.SWA), states=states if recurrent else None)


class HybridRows:
    """Rows over pools of their own: each row's pages are fixed when it begins, shuffled.

    Window pages that no later query of their row sees are poisoned before every call, and the window's page table
    begins at the first page that is seen. Running states begin as zeros; slots before them are poisoned.
    """

    def __init__(
        self,
        runner: HybridModelRunner,
        config: ModelConfig,
        spec: HybridSpec,
        mesh: Mesh,
        *,
        num_rows: int,
        num_pages: int,
    ) -> None:
        """num_pages: of each row. The pools hold as many for all rows, or more."""
        self._runner, self._config, self._spec = runner, config, spec
        self._num_pages = num_pages
        self.full_pages, self.window_pages = (
            np.random.default_rng(seed).permutation(num_rows * num_pages).reshape(num_rows, num_pages) + 1
            for seed in (1, 2)
        )
        self.buffers: HybridBuffers = zeros(spec.abstract(mesh))

    @property
    def page_size(self) -> int:
        pool = self._spec.full or self._spec.window
        return 16 if pool is None else pool.page_size

    def extend(
        self, rows: Sequence[int], chunks: Sequence[np.ndarray], prefixes: Sequence[int], *, num_tokens: int
    ) -> np.ndarray:
        """-> (len(rows), vocab_size) logits of each chunk's end. One padding row is added."""
        self._poison(rows, prefixes)
        lengths = np.array([*(chunk.size for chunk in chunks), 0], np.int32)
        token_ids = np.zeros(num_tokens, np.int32)
        token_ids[: lengths.sum()] = np.concatenate(chunks)
        padded = [*rows, None]
        inputs = ExtendInputs(
            token_ids=jnp.array(token_ids),
            chunk_starts=jnp.array((np.cumsum(lengths) - lengths).astype(np.int32) * (lengths > 0)),
            chunk_lengths=jnp.array(lengths),
            prefix_lengths=jnp.array([*prefixes, 0], jnp.int32),
            page_table=self._table(padded),
            max_chunk=num_tokens,
            window=self._window(padded, [*prefixes, 0], num_tokens),
            state_slots=self._slots(padded),
        )
        self.buffers, logits = self._runner.extend(self.buffers, inputs)
        return np.array(logits)[: len(rows)]

    def decode(self, rows: Sequence[int], token_ids: Sequence[int], lengths: Sequence[int]) -> np.ndarray:
        """-> (len(rows), vocab_size) logits. One padding row is added in front."""
        positions = [length - 1 for length in lengths]
        self._poison(rows, positions)
        padded = [None, *rows]
        inputs = DecodeInputs(
            token_ids=jnp.array([0, *token_ids], jnp.int32),
            lengths=jnp.array([0, *lengths], jnp.int32),
            page_table=self._table(padded),
            window=self._window(padded, [0, *positions], 1),
            state_slots=self._slots(padded),
        )
        self.buffers, logits = self._runner.decode(self.buffers, inputs)
        return np.array(logits)[1:]

    def _table(self, rows: Sequence[int | None]) -> jax.Array:
        nothing = np.zeros(self._num_pages, np.int32)
        return jnp.array(np.stack([nothing if row is None else self.full_pages[row] for row in rows]), jnp.int32)

    def _window(self, rows: Sequence[int | None], positions: Sequence[int], num_queries: int) -> WindowPages | None:
        window = self._config.sliding_window
        if window is None:
            return None
        width = min(pages_seen(num_queries, window, self.page_size), self._num_pages)
        first = np.array([first_seen_page(position, window, self.page_size) for position in positions], np.int32)
        table = np.zeros((len(rows), width), np.int32)
        for index, row in enumerate(rows):
            if row is not None:
                seen = self.window_pages[row, first[index] : first[index] + width]
                table[index, : seen.size] = seen
        return WindowPages(page_table=jnp.array(table), first_pages=jnp.array(first))

    def _slots(self, rows: Sequence[int | None]) -> jax.Array | None:
        states = self._spec.states
        if states is None:
            return None
        return jnp.array([states.num_slots if row is None else states.running_slots(row) for row in rows], jnp.int32)

    def _poison(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """What the rows' windows have passed, and every slot that is no running state."""
        window = self._config.sliding_window
        if window is not None:
            passed = [
                self.window_pages[row, : first_seen_page(position, window, self.page_size)]
                for row, position in zip(rows, positions, strict=True)
            ]
            pages = np.concatenate(passed)
            poisoned = jax.tree.map(lambda array: array.at[pages].set(POISON), self.buffers.window)
            self.buffers = self.buffers._replace(window=poisoned)
        if self._spec.states is not None:
            slots = slice(0, self._spec.states.running_slots(0))
            self.buffers = self.buffers._replace(
                states=jax.tree.map(lambda array: array.at[slots].set(POISON), self.buffers.states)
            )


def open_hybrid(
    config: ModelConfig, source: object, spec: HybridSpec, *, tp_size: int = 1, dtype: str = "float32"
) -> HybridModelRunner:
    runner = HybridModelRunner(config, source, make_mesh(tp_size, "cpu"), spec, dtype)
    runner.load()
    return runner
