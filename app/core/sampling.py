"""How one request wants its tokens chosen and when it wants them to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from app.errors import RequestError

MAX_LOGPROBS = 20
MAX_TOP_K = 2**31 - 1
# Far beyond what changes anything, and such that no logit becomes infinite or not a number in float32.
MAX_TEMPERATURE = 1e6
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Names and meaning as in vLLM and SGLang. Checked when made: a bad value raises RequestError naming the field."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 is all
    min_p: float = 0.0
    seed: int | None = None  # None: the scheduler gives one
    frequency_penalty: float = 0.0  # of output tokens
    presence_penalty: float = 0.0  # of output tokens
    repetition_penalty: float = 1.0  # of prompt and output tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0  # no stop of any kind takes effect before
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: also of the k likeliest
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        limits: tuple[tuple[str, bool, str], ...] = (
            ("max_tokens", self.max_tokens >= 0, "0 or more"),
            ("temperature", 0.0 <= self.temperature <= MAX_TEMPERATURE, f"0 (greedy) to {MAX_TEMPERATURE:.0f}"),
            ("top_p", 0.0 < self.top_p <= 1.0, "more than 0, at most 1"),
            ("top_k", self.top_k == -1 or 1 <= self.top_k <= MAX_TOP_K, f"1 to {MAX_TOP_K}, or -1 for all"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "0 to 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "0 to 2**64 - 1"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "-2 to 2"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "-2 to 2"),
            (
                "repetition_penalty",
                MIN_REPETITION_PENALTY <= self.repetition_penalty <= MAX_REPETITION_PENALTY,
                f"{MIN_REPETITION_PENALTY} to {MAX_REPETITION_PENALTY:.0f}",
            ),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, f"0 to max_tokens ({self.max_tokens})"),
            ("stop", all(self.stop), "strings of at least one character"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            ("logit_bias", all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values()), "biases of -100 to 100"),
        )
        for name, good, allowed in limits:
            if not good:
                raise RequestError(field=name, value=getattr(self, name), allowed=allowed)

    @property
    def reshapes_logits(self) -> bool:
        """Whether the choice depends on more than this step's logits and the temperature family."""
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0 or self.logit_bias
        )
