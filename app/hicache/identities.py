"""What tells the KV of one engine from that of others, for each kind of page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import blake3

from app.config.model_config import ModelConfig
from app.core.keys import StorageIdentity
from app.core.ports import PoolSpec, StateSpec
from app.core.transfers import OfEachPool

Identities = OfEachPool[StorageIdentity | None]

FAKE_WEIGHTS = "fake"
"""`weights_digest` of the fakes, whose KV is a function of the tokens alone."""


def storage_identities(
    *,
    weights_digest: str,
    model: ModelConfig,
    computed_dtype: str,
    tp_size: int,
    pages: PoolSpec,
    window_pages: PoolSpec | None,
    states: StateSpec | None,
    forms: OfEachPool[Sequence[Any] | None],
) -> Identities:
    """None for a kind that the model lacks. Ranks of one process store their shares of a page together.

    weights_digest: equal only for equal weights: a checkpoint's `digest`, which is computed once and kept beside the
        path, size and time of its files; `random_weights_digest`; or FAKE_WEIGHTS.
    computed_dtype: of weights and activations.
    forms: the arrays of which a page of each kind is made, as shapes and types, in the order in which they are stored.
    """
    of_model = model_digest(model)

    def identity(kind: str, stored: str, num_heads: int, form: Sequence[Any] | None) -> StorageIdentity:
        return StorageIdentity(
            model=of_model,
            weights=weights_digest,
            page_size=pages.page_size,
            tp_size=tp_size,
            dtype=f"{stored} from {computed_dtype}",
            layout=f"{kind}:{','.join(f'{array.dtype}{list(array.shape)}' for array in form or ())}",
            first_kv_head=0,
            end_kv_head=num_heads,
        )

    window = states_of_model = None
    if window_pages is not None:
        window = identity("window", window_pages.dtype, window_pages.num_kv_heads, forms.window_pages)
    if states is not None:
        states_of_model = identity("states", "float32", 0, forms.states)
    return OfEachPool(identity("full", pages.dtype, pages.num_kv_heads, forms.pages), window, states_of_model)


def model_digest(model: ModelConfig) -> str:
    """64 hex digits, equal only for models that compute the same from the same weights.

    What a server limits or looks for at the end of a text changes no KV and is left out.
    """
    computed = replace(model, context_length=0, eos_token_ids=(), bos_token_id=None)
    return blake3.blake3(json.dumps(asdict(computed), default=_listed, sort_keys=True).encode()).hexdigest()


def _listed(members: frozenset[object]) -> list[str]:
    """In an order that does not depend on this process's hashes."""
    return sorted(map(str, members))


def random_weights_digest(seed: int) -> str:
    """Of weights that are a function of a seed and the model's configuration."""
    return f"random {seed}"
