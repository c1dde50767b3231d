"""Request bodies. Their limits are declared here once: the checks and GET /openapi.json both follow them.

An optional field that is null counts as left out (`parsing`).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from app.config.server_args import MAX_GB
from app.core.sampling import MAX_LOGPROBS, MAX_REPETITION_PENALTY, MAX_TEMPERATURE, MAX_TOP_K, MIN_REPETITION_PENALTY
from app.server.openai_errors import invalid_request, not_allowed

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_INT = 2**31 - 1
DEFAULT_COMPLETION_TOKENS = 16

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
StopText = Annotated[str, Meta(min_length=1)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
LogitBias = Annotated[
    dict[Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,9})$")], Bias],
    Meta(extra={"allowed": 'an object from token ids in digits, such as "50256", to numbers from -100 to 100'}),
]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
TokenCount = Annotated[int, Meta(ge=0, le=MAX_INT)]
CacheLabel = Annotated[str, Meta(max_length=1024)]
# Words for messages where the type alone reads badly (`field_words`).
Prompt = Annotated[
    str | list[str | TokenId | list[TokenId]],
    Meta(
        description="One prompt or several, none of them empty; the entries of a list are of one kind.",
        extra={"allowed": "text, a list of texts, a list of token ids, or a list of lists of token ids"},
    ),
]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool, Meta(extra_json_schema={"const": False})] | None = None

    def __post_init__(self) -> None:
        if self.continuous_usage_stats:
            raise not_allowed(
                "stream_options.continuous_usage_stats",
                True,
                "this server does not support it; leave it out or send null or false",
            )


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What both generating routes take, named and meant as by OpenAI, vLLM and SGLang."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE, description="0 always takes the likeliest token.")] = (
        1.0
    )
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOP_K, description="-1 and 0 are all tokens.")] = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description=f"Choices a prompt; at most {MAX_PROMPTS} in all.")] = 1
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] = []
    min_tokens: Annotated[TokenCount, Meta(description="Nothing ends a choice before this many tokens.")] = 0
    ignore_eos: bool = False
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    logit_bias: LogitBias = {}
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: (
        Annotated[CacheLabel, Meta(description="Requests share cached pages only if their salts are equal.")] | None
    ) = None
    extra_key: Annotated[CacheLabel, Meta(description="Keeps cached pages apart like cache_salt.")] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="Lower is served earlier.")] = 0
    return_cached_tokens_details: bool = False

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise invalid_request("stream_options is allowed only together with stream=true", param="stream_options")

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with an event about its tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    prompt: Prompt
    max_tokens: Annotated[TokenCount, Meta(description=f"{DEFAULT_COMPLETION_TOKENS}, or what fits.")] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_prompts()
        count = len(self.prompts())
        if count > MAX_PROMPTS:
            raise invalid_request(f"prompt has {count} prompts: at most {MAX_PROMPTS} are allowed", param="prompt")
        if self.n * count > MAX_PROMPTS:
            raise not_allowed("n", self.n, f"n times the number of prompts ({count}) may be at most {MAX_PROMPTS}")

    def prompts(self) -> list[str | list[int]]:
        """One entry for each prompt, in the client's order: text, or token ids. Shares the request's lists."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]  # all of one kind, see _check_prompts
        return self.prompt  # type: ignore[return-value]

    def _check_prompts(self) -> None:
        if not self.prompt:
            raise not_allowed("prompt", self.prompt, "at least one token")
        if isinstance(self.prompt, str):
            return
        kinds = set(map(type, self.prompt))
        if len(kinds) > 1:
            raise not_allowed("prompt", self.prompt, "entries of one kind: all texts, all token ids, or all lists")
        if int not in kinds and not all(self.prompt):
            raise not_allowed("prompt", self.prompt, "at least one token in each prompt")


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text"]
    text: str


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | list[TextPart], Meta(extra={"allowed": "text, or a list of text parts"})]
    name: str | None = None  # taken and not used

    def for_template(self) -> dict[str, str]:
        """As chat templates take it: text parts joined by line ends; "developer" is what "system" is called now."""
        content = self.content
        text = content if isinstance(content, str) else "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


Messages = Annotated[list[ChatMessage], Meta(min_length=1)]


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    messages: Messages
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and not self.logprobs:
            raise not_allowed("top_logprobs", self.top_logprobs, "only together with logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise not_allowed(
                "max_completion_tokens",
                self.max_completion_tokens,
                f"the same as max_tokens={self.max_tokens}; send only one of the two",
            )

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def max_tokens_field(self) -> str:
        """The name under which the client gave `asked_max_tokens`."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def template_messages(self) -> list[dict[str, str]]:
        """What the tokenizer's chat template takes. O(characters)."""
        return [message.for_template() for message in self.messages]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True

    def __post_init__(self) -> None:
        if self.prompt is None and self.messages is None:
            raise invalid_request("prompt is missing: send prompt or messages", param="prompt")
        if self.prompt is not None and self.messages is not None:
            raise invalid_request("messages cannot be sent together with prompt", param="messages")


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """rid: the id of the reply to abort."""

    rid: str = ""
    abort_all: bool = False

    def __post_init__(self) -> None:
        if not self.rid and not self.abort_all:
            raise not_allowed("rid", self.rid, "the id of a request; or send abort_all=true")


class FlushRequest(msgspec.Struct, frozen=True, kw_only=True):
    """timeout: seconds to wait for running requests to end."""

    timeout: Annotated[float, Meta(ge=0, le=3600)] = 0.0


class AttachStorageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields as the flags of the same names; what is left out is the backend's default."""

    hicache_storage_backend: Annotated[str, Meta(min_length=1, max_length=256)]
    hicache_storage_path: Annotated[str, Meta(max_length=4096)] = ""
    hicache_storage_size: Annotated[float, Meta(gt=0, le=MAX_GB, description="GB, of 10^9 bytes.")] | None = None
    hicache_storage_options: dict[str, str] = {}


class ClearStorageRequest(msgspec.Struct, frozen=True, kw_only=True):
    """timeout: seconds after which what is not deleted yet stays."""

    timeout: Annotated[float, Meta(gt=0, le=3600)] = 60.0
