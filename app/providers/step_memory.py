"""What a step needs of the device beside weights and KV pool. Arithmetic only, and more than the compiler then uses.

tests/tpu compares it with compiled programs. It is small, but it must be there: a pool that takes everything makes the
first large step run out of memory.
"""

from __future__ import annotations

from app.config.model_config import ModelConfig
from app.config.server_args import ServerArgs
from app.runtime.buckets import MIN_CHUNK, MIN_ROWS, bucket
from app.scheduling.limits import SchedulerLimits

# Float32 arrays of (rows, vocabulary) that live at once: logits of the two sections of a step, a copy that the ranks'
# shares are brought together in, and what the dearest sampler makes of them.
_LOGITS = 6
_PENALTY_BYTES = 9  # a row and token id: a count, whether the prompt has it, a bias


def penalty_table_bytes(args: ServerArgs, model: ModelConfig) -> int:
    """Of one device; every device holds them whole, from the first request that needs them."""
    return _PENALTY_BYTES * args.max_running_requests * model.vocab_size


def step_bytes(args: ServerArgs, model: ModelConfig, limits: SchedulerLimits, dtype: str) -> int:
    """Over all ranks. dtype: of activations."""
    logits = 4 * _LOGITS * bucket(args.max_running_requests, MIN_ROWS) * model.vocab_size
    # Of a layer at a time: what goes round it, and the widest that it makes of that, a rank's share.
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widest = max(model.intermediate_size, heads) / args.tp_size
    element_bytes = 4 if dtype == "float32" else 2
    activations = bucket(limits.chunk_tokens, MIN_CHUNK) * element_bytes * (4 * model.hidden_size + 3 * int(widest))
    return args.tp_size * (penalty_table_bytes(args, model) + logits + activations)
