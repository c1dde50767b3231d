"""Drives a model runner and a pool as a runtime would, one call at a time, with page ids of the test's choice."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from app.config.model_config import ModelConfig
from app.config.parallel import padded_kv_heads
from app.core.ports import DecodeInputs, ExtendInputs, ModelRunner, PoolSpec
from app.models.model_runner import LlamaModelRunner
from app.models.random_weights import RandomWeights
from app.tpu.kv_pool import MHATokenToKVPool
from app.tpu.mesh import make_mesh


def small_config(**fields: Any) -> ModelConfig:
    defaults = {
        "architecture": "llama",
        "vocab_size": 101,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 16,
        "context_length": 256,
    }
    return ModelConfig(**{**defaults, **fields})


def spec_of(
    config: ModelConfig, *, page_size: int, num_pages: int, tp_size: int = 1, dtype: str = "float32"
) -> PoolSpec:
    return PoolSpec(
        num_pages=num_pages,
        page_size=page_size,
        num_layers=config.num_layers,
        num_kv_heads=padded_kv_heads(config.num_heads, config.num_kv_heads, tp_size),
        head_dim=config.head_dim,
        dtype=dtype,
    )


def open_llama(
    config: ModelConfig, spec: PoolSpec, *, tp_size: int = 1, weights: Any = None, dtype: str = "float32"
) -> tuple[LlamaModelRunner, MHATokenToKVPool]:
    mesh = make_mesh(tp_size, "cpu")
    runner = LlamaModelRunner(config, weights or RandomWeights(config), mesh, spec, dtype)
    runner.load()
    pool = MHATokenToKVPool(spec, mesh)
    pool.open()
    return runner, pool


class Rows:
    """Rows over a pool: each row's pages are fixed when it begins, shuffled; every call may serve any of them."""

    def __init__(
        self, runner: ModelRunner, pool: MHATokenToKVPool, num_rows: int, num_pages: int, seed: int = 0
    ) -> None:
        order = np.random.default_rng(seed).permutation(pool.spec.num_pages)[: num_rows * num_pages] + 1
        self.pages = order.reshape(num_rows, num_pages).astype(np.int32)
        self._runner, self._pool = runner, pool

    def extend(
        self, rows: list[int], chunks: list[np.ndarray], prefixes: list[int], *, num_tokens: int, max_chunk: int
    ) -> np.ndarray:
        """-> (len(rows), vocab_size) logits of each chunk's end. One padding row is added."""
        lengths = np.array([*(chunk.size for chunk in chunks), 0], np.int32)
        token_ids = np.zeros(num_tokens, np.int32)
        token_ids[: lengths.sum()] = np.concatenate(chunks)
        inputs = ExtendInputs(
            token_ids=jnp.array(token_ids),
            chunk_starts=jnp.array((np.cumsum(lengths) - lengths).astype(np.int32) * (lengths > 0)),
            chunk_lengths=jnp.array(lengths),
            prefix_lengths=jnp.array([*prefixes, 0], jnp.int32),
            page_table=jnp.array(np.vstack([self.pages[rows], np.zeros_like(self.pages[:1])])),
            max_chunk=max_chunk,
        )
        buffers, logits = self._runner.extend(self._pool.take(), inputs)
        self._pool.put(buffers)
        return np.array(logits)[: len(rows)]

    def decode(self, rows: list[int], token_ids: list[int], lengths: list[int]) -> np.ndarray:
        """-> (len(rows), vocab_size) logits. One padding row is added in front."""
        inputs = DecodeInputs(
            token_ids=jnp.array([0, *token_ids], jnp.int32),
            lengths=jnp.array([0, *lengths], jnp.int32),
            page_table=jnp.array(np.vstack([np.zeros_like(self.pages[:1]), self.pages[rows]])),
        )
        buffers, logits = self._runner.decode(self._pool.take(), inputs)
        self._pool.put(buffers)
        return np.array(logits)[1:]
