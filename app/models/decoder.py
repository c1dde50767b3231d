"""What every family is made of: layers of mixers and an FFN between norms and residual sums.

A `Decoder` is a description and holds no arrays. Equal layers are equal objects, so a program compiled for one layer,
or for a row of them, serves all that are like it. The functions run on one rank's share of heads, FFN columns, experts
and vocabulary, inside `shard_map`; sums over ranks are written out, two a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp

from app.config.model_config import Component
from app.models.layers.attention import Scores
from app.models.layers.linear import product, summed
from app.models.layers.norms import RmsNorm
from app.models.layers.rope import Rope, Rotation
from app.models.steps import ExtendRows
from app.models.weight_plan import TensorPlan
from app.tpu.mesh import TENSOR_AXIS

Leaf = TypeVar("Leaf")  # an array; or its plan, its shape, its partition, in the same structure

Kept = dict[str, Any]
"""What one layer keeps on the device: Component.value -> what the driver holds it in. Handed on, written in place."""


class Recurrence(Protocol):
    """A recurrent layer's computation. `states`: the layer's arrays, each of them (rows, *its shape)."""

    def decode(self, x: jax.Array, states: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """One token for each of B rows: (B, embed) -> (this rank's share of the output, the states after it)."""
        ...

    def extend(
        self, x: jax.Array, rows: ExtendRows, max_chunk: int, states: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Packed chunks of S rows: (T, embed) -> (this rank's share of the output, the states after each chunk)."""
        ...


class Step(Protocol):
    """What a driver does for the mixers of its layers, for the tokens of one step."""

    def turns(self, rope: Rope) -> Rotation:
        """Of the step's tokens."""
        ...

    def attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, kept: Kept, scores: Scores, sinks: jax.Array | None
    ) -> tuple[jax.Array, Kept]:
        """Store the tokens' keys and values, (T, kv_heads, head_dim), then attend: -> (T, heads * head_dim), kept.

        q: (T, heads, head_dim), unscaled; sinks: (heads,). In the layer's window pages if `scores` has a window.
        """
        ...

    def attend_latent(
        self, q: jax.Array, latent: jax.Array, kept: Kept, scores: Scores, value_dim: int
    ) -> tuple[jax.Array, Kept]:
        """The same with one latent (T, width) for all heads: each is a key, and its first value_dim are the value.

        q: (T, heads, width) -> (T, heads * value_dim), kept.
        """
        ...

    def recur(self, recurrence: Recurrence, x: jax.Array, kept: Kept) -> tuple[jax.Array, Kept]:
        """Run each row's tokens from its state, and keep the state after them."""
        ...


class Mixer(Protocol):
    """What brings tokens together: attention of some kind, or a recurrence. Hashable."""

    @property
    def component(self) -> Component:
        """What it keeps of a sequence."""
        ...

    @property
    def ropes(self) -> tuple[Rope, ...]: ...

    @property
    def plans(self) -> Any:
        """Its weights, as plans."""
        ...

    def mix(self, weights: Any, x: jax.Array, kept: Kept, step: Step) -> tuple[jax.Array, Kept]:
        """(T, embed) -> this rank's share of the output, (T, embed), whose sum over ranks counts."""
        ...


class Ffn(Protocol):
    """What works on each token alone. Hashable."""

    @property
    def plans(self) -> Any: ...

    def apply(self, weights: Any, x: jax.Array) -> jax.Array:
        """(T, embed) -> this rank's share of the output."""
        ...


class LayerWeights(NamedTuple, Generic[Leaf]):
    """One layer. None where a model has none."""

    input_norm: Leaf  # (embed,)
    mixers: tuple[Any, ...]
    ffn_norm: Leaf  # (embed,)
    ffn: Any
    mixed_norm: Leaf | None = None  # (embed,), of the mixers' output
    ffn_out_norm: Leaf | None = None  # (embed,)


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """mixers: side by side, their outputs summed."""

    mixers: tuple[Mixer, ...]
    ffn: Ffn
    norm: RmsNorm
    norms: tuple[TensorPlan, TensorPlan]  # before the mixers, before the FFN
    post_norms: tuple[TensorPlan, TensorPlan] | tuple[None, None] = (None, None)  # after each

    @property
    def components(self) -> frozenset[Component]:
        return frozenset(mixer.component for mixer in self.mixers)

    @property
    def plans(self) -> LayerWeights[TensorPlan]:
        return LayerWeights(
            input_norm=self.norms[0],
            mixers=tuple(mixer.plans for mixer in self.mixers),
            ffn_norm=self.norms[1],
            ffn=self.ffn.plans,
            mixed_norm=self.post_norms[0],
            ffn_out_norm=self.post_norms[1],
        )

    def run(
        self, weights: LayerWeights[jax.Array], hidden: jax.Array, kept: Kept, step: Step
    ) -> tuple[jax.Array, Kept]:
        """T tokens through the layer, (T, embed) -> (hidden, kept)."""
        normed = self.norm(hidden, weights.input_norm)
        shares = []
        for mixer, own in zip(self.mixers, weights.mixers, strict=True):
            share, kept = mixer.mix(own, normed, kept, step)
            shares.append(share)
        hidden = hidden + self._after(summed(sum(shares[1:], shares[0])), weights.mixed_norm)
        normed = self.norm(hidden, weights.ffn_norm)
        return hidden + self._after(summed(self.ffn.apply(weights.ffn, normed)), weights.ffn_out_norm), kept

    def _after(self, out: jax.Array, weight: jax.Array | None) -> jax.Array:
        return out if weight is None else self.norm(out, weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model without its weights. head: None where the embedding is the head too."""

    layers: tuple[DecoderLayer, ...]
    embedding: TensorPlan  # (vocab, embed)
    head: TensorPlan | None
    final_norm: TensorPlan
    norm: RmsNorm
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None

    @property
    def ropes(self) -> frozenset[Rope]:
        return frozenset(rope for layer in self.layers for mixer in layer.mixers for rope in mixer.ropes)

    def plans(self) -> Iterator[tuple[TensorPlan, int | None]]:
        """Every weight once, with its layer."""
        for index, layer in enumerate(self.layers):
            for plan in jax.tree.leaves(layer.plans):
                yield plan, index
        for plan in (self.embedding, self.head, self.final_norm):
            if plan is not None:
                yield plan, None

    @property
    def num_parameters(self) -> int:
        """Elements of all weights."""
        return sum(plan.num_elements for plan, _ in self.plans())

    def weight_bytes(self, dtype: str) -> int:
        """Of all weights in a model of this dtype, over all ranks."""
        return sum(plan.num_elements * jnp.dtype(plan.dtype or dtype).itemsize for plan, _ in self.plans())

    def embed(self, embedding: jax.Array, token_ids: jax.Array) -> jax.Array:
        """(T,) int32 -> (T, embed). Each rank looks up the ids that its share of the vocabulary has."""
        own = token_ids - jax.lax.axis_index(TENSOR_AXIS) * embedding.shape[0]
        here = (own >= 0) & (own < embedding.shape[0])
        rows = summed(jnp.where(here[:, None], embedding[jnp.where(here, own, 0)], 0))
        return rows if self.embedding_scale == 1.0 else rows * jnp.asarray(self.embedding_scale, rows.dtype)

    def logits(self, head: jax.Array, final_norm: jax.Array, hidden: jax.Array) -> jax.Array:
        """(rows, embed) -> (rows, this rank's share of the vocabulary) float32."""
        found = product(self.norm(hidden, final_norm), head, jnp.float32) * self.logit_scale
        return found if self.logit_soft_cap is None else self.logit_soft_cap * jnp.tanh(found / self.logit_soft_cap)
