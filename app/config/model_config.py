"""What a model is: its sizes, what each layer keeps, and the switches that families of models differ by.

Read from config.json without touching weights.
"""

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
    """How the frequencies of a rope are changed for longer contexts; `kind` "none" leaves them as they are."""

    kind: str = "none"  # none | linear | llama3 | yarn
    factor: float = 1.0
    low_freq_factor: float = 1.0  # of llama3
    high_freq_factor: float = 4.0
    original_context_length: int = 8192  # of llama3 and yarn
    beta_fast: float = 32.0  # of yarn: turns within the original context, from which on a pair stays as it is
    beta_slow: float = 1.0  # and up to which it is slowed down by `factor`
    whole_pairs: bool = True  # of yarn: round the pairs at which that is so outwards
    attention_factor: float = 1.0  # of yarn: by which rotated queries and keys are longer


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
class LatentShape:
    """Latent attention (MLA): what a token keeps, and what a head is made of."""

    latent_dim: int
    rope_dim: int  # of a head, rotated
    plain_dim: int  # of a head, not rotated
    value_dim: int  # of a head
    query_rank: int | None = None  # of the latent that queries are made of; None where they are made directly
    score_scale: float  # by which scores are multiplied
    paired_rows: bool = True  # the two numbers that are rotated together lie side by side in the checkpoint
    biases: bool = False  # of the latents

    @property
    def stored_dim(self) -> int:
        """Numbers that a token has in the pool."""
        return self.latent_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaShape:
    """A gated delta net. Head counts are over all ranks, which share key heads with the value heads that are theirs."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int  # of a head
    num_taps: int  # of the convolutions
    norm_eps: float

    @property
    def states(self) -> tuple[StateArray, ...]:
        """What a row keeps: inputs of the convolutions of queries, keys and values, and the heads' matrices."""
        keys = StateArray(shape=(self.num_taps - 1, self.num_key_heads * self.key_dim), sharded_axis=1)
        values = StateArray(shape=(self.num_taps - 1, self.num_value_heads * self.value_dim), sharded_axis=1)
        matrices = StateArray(shape=(self.num_value_heads, self.key_dim, self.value_dim), sharded_axis=0)
        return keys, keys, values, matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceScales:
    """By which products of a state-space layer are multiplied: those with its input, and what comes out."""

    gate: float = 1.0
    x: float = 1.0
    into: float = 1.0
    read: float = 1.0
    step: float = 1.0
    out: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceShape:
    """A state-space layer (Mamba-2). Head counts are over all ranks."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    num_taps: int  # of the convolutions
    norm_eps: float
    normed: bool = False  # a norm over each group of heads before the output
    gate_after_norm: bool = False  # and the gate after it
    conv_bias: bool = True
    least_step: float = 0.0
    greatest_step: float = math.inf
    scales: StateSpaceScales = StateSpaceScales()

    @property
    def states(self) -> tuple[StateArray, ...]:
        """What a row keeps: inputs of the convolutions of x, in and read, and the heads' matrices."""
        x = StateArray(shape=(self.num_taps - 1, self.num_heads * self.head_dim), sharded_axis=1)
        shared = StateArray(shape=(self.num_taps - 1, self.num_groups * self.state_dim))
        matrices = StateArray(shape=(self.num_heads, self.head_dim, self.state_dim), sharded_axis=0)
        return x, shared, shared, matrices


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture of experts that most layers of a model have for an FFN."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    normalised: bool = True  # the chosen experts' weights sum to one
    dense_layers: frozenset[int] = frozenset()  # layers with a plain FFN instead
    gate_limit: float | None = None  # both inner products of an expert are clamped to it (gpt_oss)
    shared_size: int | None = None  # of an FFN beside the experts that every token goes through
    num_groups: int = 1  # of experts, of which a token's come from the best groups_per_token (DeepSeek)
    groups_per_token: int = 1
    scale: float = 1.0  # by which the experts' weights are multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer. The families' readers (app/models/families) fill in what their members have."""

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
    norm_offset: float = 0.0  # added to the weights of norms (Gemma stores them less 1)
    post_norms: bool = False  # norms after attention and FFN too (Gemma)
    activation: str = "silu"  # of the FFN's gate: silu | gelu_tanh
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    window_rope_theta: float | None = None  # of SWA layers, which then have no scaling (Gemma 3)
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0  # by which embeddings are multiplied
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None  # c: logits become c * tanh(logit / c)
    attention_bias: bool = False  # q, k and v projections (Qwen2)
    attention_out_bias: bool = False  # o projection
    attention_sinks: bool = False  # a learned score for each head that takes weight from the keys (gpt_oss)
    attention_scale: float | None = None  # of scores; head_dim ** -0.5 where None
    attention_soft_cap: float | None = None  # as logit_soft_cap, of scores
    qk_norm: bool = False  # RMS norm of each query and key head (Qwen3)
    rotary_dim: int | None = None  # how many of a head's first elements the rope turns; all where None
    attention_gate: bool = False  # what heads attend to is gated by a product with the layer's input (Qwen3-Next)
    attention_out_scale: float = 1.0  # by which what attention adds is multiplied
    latent: LatentShape | None = None  # then head_dim is its stored_dim and num_kv_heads is 1
    gated_delta: GatedDeltaShape | None = None  # of RECURRENT layers of that kind
    state_space: StateSpaceShape | None = None  # the same
    ffn_gate_scale: float = 1.0  # by which an FFN's gate is multiplied before its activation
    ffn_out_scale: float = 1.0
    experts: ExpertsConfig | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sliding_window: int | None = None  # W: a query at i sees keys at j with i - W < j <= i, in its SWA layers
    components: frozenset[Component] = frozenset({Component.FULL})
    layer_components: tuple[frozenset[Component], ...] = ()  # of each layer; empty where each has all of the model's
    recurrent_state: tuple[StateArray, ...] = ()  # the arrays of one recurrent layer; every such layer has the same

    @property
    def is_hybrid(self) -> bool:
        """Whether it keeps anything but keys and values of full attention."""
        return self.latent_kv or self.components != {Component.FULL}

    @property
    def latent_kv(self) -> bool:
        """One latent of head_dim is all that a token keeps."""
        return self.latent is not None

    def layers_with(self, component: Component) -> tuple[int, ...]:
        """The layers, in order, that have this component."""
        return tuple(layer for layer in range(self.num_layers) if component in self.components_of(layer))

    def components_of(self, layer: int) -> frozenset[Component]:
        return self.layer_components[layer] if self.layer_components else self.components
