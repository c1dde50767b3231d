"""Run in a process of its own with 8 CPU devices: layers cut over 1, 2 and 4 ranks. Prints JSON: how far from 1 rank.

Of each layer the shares are summed over ranks, which is what its caller does, and states are put together again.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from app.config.model_config import GatedDeltaShape, LatentShape, StateSpaceShape
from app.models.layers import latent_attention
from app.models.layers.gated_delta import GatedDeltaNet, GatedDeltaWeights
from app.models.layers.latent_attention import LatentWeights
from app.models.layers.linear import summed
from app.models.layers.moe import Chosen, ExpertWeights, experts_share, silu_gate
from app.models.layers.state_space import StateSpace, StateSpaceWeights
from app.tpu.mesh import TENSOR_AXIS, make_mesh
from tests.support.recurrent_reference import packed_rows, random_states, random_weights

WHOLE, ROWS, COLUMNS = PartitionSpec(), PartitionSpec(TENSOR_AXIS), PartitionSpec(None, TENSOR_AXIS)
EMBED, NUM_TOKENS = 32, 24
X = np.random.default_rng(0).normal(0, 1, (NUM_TOKENS, EMBED)).astype(np.float32)
PACKED = jax.tree.map(jnp.asarray, packed_rows([9, 12], [0, 10]))
Results = tuple[Any, ...]


def run(
    tp_size: int, function: Callable[..., Results], weights: Any, cuts: Any, states: Any, state_cuts: Any
) -> Results:
    """function: (weights, states) -> a share, and states."""

    def share(weights: Any, states: Any) -> Results:
        out, states = function(weights, states)
        return summed(out), states

    on_ranks = jax.shard_map(
        share,
        mesh=make_mesh(tp_size, "cpu"),
        in_specs=(cuts, state_cuts),
        out_specs=(WHOLE, state_cuts),
        check_vma=False,
    )
    out, states = jax.jit(on_ranks)(weights, states)
    return tuple(np.asarray(array) for array in jax.tree.leaves((out, states)))


def gated_delta(tp_size: int) -> Results:
    shape = GatedDeltaShape(num_key_heads=4, num_value_heads=8, key_dim=8, value_dim=6, num_taps=4, norm_eps=1e-3)
    keys, values, heads = 32, 48, 8
    matrices = {"q": keys, "k": keys, "v": values, "z": values, "rate": heads, "step": heads}
    shapes: dict[str, tuple[int, ...]] = {name: (width, EMBED) for name, width in matrices.items()}
    shapes |= {"q_conv": (4, keys), "k_conv": (4, keys), "v_conv": (4, values)}
    shapes |= {"step_bias": (4, 2), "log_speed": (4, 2), "norm": (6,), "out": (EMBED, values)}
    columns = dict.fromkeys(("q_conv", "k_conv", "v_conv", "out"), COLUMNS)
    cuts = GatedDeltaWeights(**{**dict.fromkeys(shapes, ROWS), **columns, "norm": WHOLE})  # type: ignore[arg-type]
    weights = random_weights(np.random.default_rng(1), GatedDeltaWeights, shapes)
    return both_steps(tp_size, GatedDeltaNet, shape, weights, cuts)


def state_space(tp_size: int) -> Results:
    """With fewer groups than the most ranks, so that a norm spans ranks."""
    shape = StateSpaceShape(num_heads=4, head_dim=12, num_groups=2, state_dim=8, num_taps=4, norm_eps=1e-3)
    inner, shared, heads = 48, 16, 4
    widths = {"gate": inner, "x": inner, "into": shared, "read": shared, "step": heads}
    shapes: dict[str, tuple[int, ...]] = {name: (width, EMBED) for name, width in widths.items()}
    shapes |= {"x_conv": (4, inner), "into_conv": (4, shared), "read_conv": (4, shared), "out": (EMBED, inner)}
    shapes |= dict.fromkeys(("step_bias", "log_speed", "skip"), (heads,))
    shapes |= {"norm": (inner,), "x_conv_bias": (inner,)}
    whole = dict.fromkeys(("into", "read", "into_conv", "read_conv"), WHOLE)
    columns = {"x_conv": COLUMNS, "out": COLUMNS}
    named: Any = {**dict.fromkeys(shapes, ROWS), **whole, **columns}
    weights = random_weights(np.random.default_rng(2), StateSpaceWeights, shapes)
    return both_steps(tp_size, StateSpace, shape, weights, StateSpaceWeights(**named))


def both_steps(tp_size: int, layer: Any, shape: Any, weights: Any, cuts: Any) -> Results:
    states = random_states(np.random.default_rng(3), shape.states, 2)
    state_cuts = tuple(
        WHOLE if array.sharded_axis is None else PartitionSpec(None, *(None,) * array.sharded_axis, TENSOR_AXIS)
        for array in shape.states
    )

    def extend(weights: Any, states: Any) -> Results:
        found: Results = layer(shape, weights).extend(X, PACKED, 16, states)
        return found

    def decode(weights: Any, states: Any) -> Results:
        found: Results = layer(shape, weights).decode(X[:2], states)
        return found

    steps = (extend, decode)
    return tuple(array for step in steps for array in run(tp_size, step, weights, cuts, states, state_cuts))


def experts(tp_size: int) -> Results:
    rng = np.random.default_rng(4)
    shapes = {"gate": (8, EMBED, 20), "up": (8, EMBED, 20), "down": (8, 20, EMBED), "down_bias": (8, EMBED)}
    weights = ExpertWeights(**{name: jnp.asarray(rng.normal(0, 0.2, s), jnp.float32) for name, s in shapes.items()})
    named: Any = dict.fromkeys(shapes, ROWS)
    chosen = Chosen(
        experts=np.argsort(rng.normal(size=(NUM_TOKENS, 8)), axis=1)[:, :3].astype(np.int32),  # type: ignore[arg-type]
        weights=rng.uniform(size=(NUM_TOKENS, 3)).astype(np.float32),  # type: ignore[arg-type]
    )

    def share(weights: ExpertWeights, states: Any) -> Results:
        return experts_share(jnp.asarray(X), jax.tree.map(jnp.asarray, chosen), weights, silu_gate), states

    return run(tp_size, share, weights, ExpertWeights(**named), (), ())


def latents(tp_size: int) -> Results:
    """Queries are cut, what is stored is whole, and the output is a share."""
    shape = LatentShape(latent_dim=16, rope_dim=4, plain_dim=8, value_dim=6, score_scale=1.0)
    rng = np.random.default_rng(5)
    shapes = {"q": (96, EMBED), "latent": (20, EMBED), "latent_norm": (16,)}
    shapes |= {"key": (8, 8, 16), "value": (8, 6, 16), "out": (EMBED, 48)}
    weights = LatentWeights(**{name: jnp.asarray(rng.normal(0, 0.3, s), jnp.float32) for name, s in shapes.items()})
    named: Any = {**dict.fromkeys(shapes, ROWS), "latent": WHOLE, "latent_norm": WHOLE, "out": COLUMNS}
    turn = jnp.ones((NUM_TOKENS, 1, 2), jnp.float32)

    def share(weights: LatentWeights, states: Any) -> Results:
        x = jnp.asarray(X)
        q = latent_attention.queries(weights, x, turn * 0.6, turn * 0.8, shape)
        rows = latent_attention.stored(weights, x, turn * 0.6, turn * 0.8, shape)
        mixed = jnp.einsum("ths,is->thi", q, rows)
        attended = jnp.einsum("thi,il->thl", mixed, rows[:, : shape.latent_dim])
        return latent_attention.output(weights, attended.reshape(NUM_TOKENS, -1)), states

    return run(tp_size, share, weights, LatentWeights(**named), (), ())


LAYERS = {"gated delta": gated_delta, "state space": state_space, "experts": experts, "latents": latents}


def furthest(got: Results, wanted: Results) -> float:
    """Of all arrays the greatest difference, as a share of the array's greatest number."""
    pairs = zip(got, wanted, strict=True)
    return max(float(np.abs(own - other).max() / np.abs(other).max()) for own, other in pairs)


if __name__ == "__main__":
    found = {}
    for name, layer in LAYERS.items():
        alone = layer(1)
        found |= {f"{name}, {tp_size} ranks": furthest(layer(tp_size), alone) for tp_size in (2, 4)}
    print(json.dumps(found))
