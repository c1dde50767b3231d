"""Run in a process of its own with 8 CPU devices: one model at every tensor-parallel size. Prints what it found."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from app.core.ports import DecodeInputs
from app.models.decoder_programs import StepRows
from app.models.steps import DecodeRows
from app.tpu.hybrid_buffers import HybridBuffers
from app.tpu.pool_layout import KVBuffers
from tests.support.llama_rig import Rows, open_llama, small_config, spec_of

COLLECTIVES = re.compile(r" = \S+ (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")
CONFIG = small_config(num_heads=8, num_kv_heads=2, attention_bias=True, qk_norm=True)
TOKENS = np.random.default_rng(3).integers(0, 101, 20).astype(np.int32)


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def run(tp_size: int) -> dict[str, Any]:
    spec = spec_of(CONFIG, page_size=4, num_pages=12, tp_size=tp_size)
    runner, pool = open_llama(CONFIG, spec, tp_size=tp_size)
    rows = Rows(runner, pool, num_rows=2, num_pages=6)
    extended = rows.extend([0, 1], [TOKENS[:9], TOKENS[:20]], [0, 0], num_tokens=32, max_chunk=32)
    decoded = rows.decode([0], [int(TOKENS[9])], [10])
    contents = pool.page_contents(rows.pages.reshape(-1))

    before = pool.take()
    places = [pointers(array) for array in jax.tree.leaves(before)]
    inputs = DecodeInputs(
        token_ids=jnp.zeros(2, jnp.int32), lengths=jnp.array([0, 21], jnp.int32), page_table=jnp.array(rows.pages)
    )
    after, _ = jax.block_until_ready(runner.decode(before, inputs))
    return {
        "logits": np.concatenate([extended, decoded]).tolist(),
        # Ranks beyond the model's KV heads hold copies: one of each.
        "contents": contents[..., :: spec.num_kv_heads // CONFIG.num_kv_heads, :].tolist(),
        "shard_shape": list(after.keys[0].addressable_shards[0].data.shape),
        "old_deleted": all(array.is_deleted() for array in jax.tree.leaves(before)),
        "same_place": places == [pointers(array) for array in jax.tree.leaves(after)],
        "collectives": collectives(runner, after, inputs),
    }


def collectives(runner: Any, buffers: Any, inputs: DecodeInputs) -> list[str]:
    """Of the first group's compiled program."""
    programs = runner._runner._programs
    group = programs.groups[0]
    held = programs.buffers_of(HybridBuffers(buffers, KVBuffers((), ()), ()), group)
    hidden = jnp.zeros((2, CONFIG.hidden_size))
    rows = StepRows(DecodeRows(inputs.lengths, inputs.page_table), None, None)
    lowered = group.decode.lower(held, runner._runner._weights.layers[group.layers], hidden, rows)
    return COLLECTIVES.findall(lowered.compile().as_text())


if __name__ == "__main__":
    print(json.dumps({str(tp_size): run(tp_size) for tp_size in (1, 2, 4, 8)}))
