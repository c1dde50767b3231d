"""What a model is, as far as memory and scheduling need to know. Read from config.json without touching weights."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Component(enum.Enum):
    """A kind of per-token or per-request state that a cache must be able to hold for a model."""

    FULL = "full"  # full attention: KV of every token
    SWA = "swa"  # sliding-window attention: KV of the last W tokens
    RECURRENT = "recurrent"  # a state valid for exactly one token count


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """Llama-3 style frequency scaling; `kind` "none" leaves frequencies as they are, "linear" divides them."""

    kind: str = "none"  # none | linear | llama3
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class StateArray:
    """One array of a recurrent layer's state, without the axis of slots. Shapes are over all ranks.

    sharded_axis: the axis that tensor parallelism cuts; None where every rank holds all of it. Elements are float32.
    """

    shape: tuple[int, ...]
    sharded_axis: int | None = None

    @property
    def num_bytes(self) -> int:
        return 4 * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family, with the switches its members differ by."""

    architecture: str  # as in config.json's model_type: llama, mistral, qwen2, qwen3, ...
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int  # tokens, prompt and output together
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # q, k and v projections (Qwen2)
    qk_norm: bool = False  # RMS norm of each query and key head (Qwen3)
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sliding_window: int | None = None  # W: a query at i sees keys at j with i - W < j <= i, in its SWA layers
    components: frozenset[Component] = frozenset({Component.FULL})
    layer_components: tuple[frozenset[Component], ...] = ()  # of each layer; empty where each has all of the model's
    recurrent_state: tuple[StateArray, ...] = ()  # the arrays of one recurrent layer; every such layer has the same

    def layers_with(self, component: Component) -> tuple[int, ...]:
        """The layers, in order, that have this component."""
        kinds = self.layer_components or (self.components,) * self.num_layers
        return tuple(layer for layer, kind in enumerate(kinds) if component in kind)

    @property
    def num_parameters(self) -> int:
        """Elements of all weights; exact for the dense Llama family."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        heads = 1 if self.tie_word_embeddings else 2
        return self.num_layers * layer + heads * self.vocab_size * self.hidden_size + self.hidden_size
