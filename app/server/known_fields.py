"""Request fields of OpenAI, vLLM and SGLang that this server knows and does not support.

Clients send many of them with the value that changes nothing, so that value is taken; any other is refused rather
than silently left out. A route's own fields (`schemas`) come first: what it supports is not looked up here.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from app.server.openai_errors import not_allowed

MAX_IGNORED = 16
MAX_NAME_LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsupportedField:
    """neutral: values beside null that ask for nothing. hint: what to do instead."""

    neutral: tuple[object, ...] = ()
    hint: str = ""

    def accepts(self, value: object) -> bool:
        """Whether `value` asks for nothing. True and 1 are different values, 1 and 1.0 are not."""
        return value is None or any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.neutral
        )

    def allowed(self) -> str:
        values = " or ".join(["null", *(msgspec.json.encode(neutral).decode() for neutral in self.neutral)])
        return f"this server does not support it; leave it out or send {values}" + (self.hint and f" ({self.hint})")


_ONLY_NULL = UnsupportedField()
_FALSE = UnsupportedField(neutral=(False,))
_TRUE = UnsupportedField(neutral=(True,))
_EMPTY_LIST = UnsupportedField(neutral=([],))
_EMPTY_OBJECT = UnsupportedField(neutral=({},))

UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = MappingProxyType(
    {
        # tools
        "tools": _EMPTY_LIST,
        "tool_choice": UnsupportedField(neutral=("none", "auto")),
        "parallel_tool_calls": UnsupportedField(neutral=(True, False)),
        "functions": _EMPTY_LIST,
        "function_call": UnsupportedField(neutral=("none", "auto")),
        "web_search_options": _ONLY_NULL,
        # what an answer must look like
        "response_format": UnsupportedField(neutral=({"type": "text"},)),
        "structured_outputs": _ONLY_NULL,
        "structural_tag": _ONLY_NULL,
        "guided_json": _ONLY_NULL,
        "guided_regex": _ONLY_NULL,
        "guided_choice": _ONLY_NULL,
        "guided_grammar": _ONLY_NULL,
        "guided_decoding_backend": _ONLY_NULL,
        "guided_whitespace_pattern": _ONLY_NULL,
        "json_schema": _ONLY_NULL,
        "regex": _ONLY_NULL,
        "ebnf": _ONLY_NULL,
        "prediction": _ONLY_NULL,
        "verbosity": UnsupportedField(neutral=("medium",)),
        "reasoning_effort": UnsupportedField(neutral=("none",)),
        "thinking_token_budget": _ONLY_NULL,
        "include_reasoning": _TRUE,
        "separate_reasoning": _TRUE,
        "stream_reasoning": _TRUE,
        # how tokens are chosen, and when they end
        "best_of": UnsupportedField(neutral=(1,), hint="for several answers use n"),
        "use_beam_search": _FALSE,
        "length_penalty": UnsupportedField(neutral=(1.0,)),
        "early_stopping": _FALSE,
        "bad_words": _EMPTY_LIST,
        "allowed_token_ids": _ONLY_NULL,
        "logits_processors": _EMPTY_LIST,
        "custom_logit_processor": _ONLY_NULL,
        "custom_params": _EMPTY_OBJECT,
        "stop_regex": _EMPTY_LIST,
        "include_stop_str_in_output": _FALSE,
        "no_stop_trim": _FALSE,
        # what else an answer holds
        "echo": _FALSE,
        "suffix": UnsupportedField(neutral=("",)),
        "modalities": UnsupportedField(neutral=(["text"],)),
        "audio": _ONLY_NULL,
        "prompt_logprobs": _ONLY_NULL,
        "detokenize": _TRUE,
        "spaces_between_special_tokens": _TRUE,
        "return_tokens_as_token_ids": _FALSE,
        "return_token_ids": _FALSE,
        "return_prompt_token_ids": _FALSE,
        "return_token_strs": _FALSE,
        "return_hidden_states": _FALSE,
        "return_routed_experts": _FALSE,
        # how a prompt is made
        "add_special_tokens": UnsupportedField(neutral=(False,), hint="write special tokens into the text"),
        "chat_template": _ONLY_NULL,
        "chat_template_kwargs": _EMPTY_OBJECT,
        "continue_final_message": _FALSE,
        "documents": _EMPTY_LIST,
        "mm_processor_kwargs": _EMPTY_OBJECT,
        "prompt_embeds": _ONLY_NULL,
        "truncate_prompt_tokens": _ONLY_NULL,
        # adapters
        "lora_path": _ONLY_NULL,
        "lora_name": _ONLY_NULL,
        "lora_request": _ONLY_NULL,
        "adapter": _ONLY_NULL,
        # where and under which name a request runs
        "service_tier": UnsupportedField(neutral=("auto", "default")),
        "store": _FALSE,
        "metadata": _EMPTY_OBJECT,
        "data_parallel_rank": UnsupportedField(neutral=(0,)),
        "routed_dp_rank": UnsupportedField(neutral=(0,)),
        "kv_transfer_params": _ONLY_NULL,
        "bootstrap_host": _ONLY_NULL,
        "bootstrap_port": _ONLY_NULL,
        "bootstrap_room": _ONLY_NULL,
        "session_params": _EMPTY_OBJECT,
        "session_id": _ONLY_NULL,
        "rid": UnsupportedField(hint="a request is named by the id of its reply"),
        "request_id": UnsupportedField(hint="a request is named by the id of its reply"),
        "vllm_xargs": _EMPTY_OBJECT,
        # fields of the other routes: they would be left out without a word
        "messages": UnsupportedField(hint="messages go to /v1/chat/completions"),
        "prompt": UnsupportedField(hint="a prompt goes to /v1/completions"),
        "max_completion_tokens": UnsupportedField(hint="here the field is max_tokens"),
        "top_logprobs": UnsupportedField(neutral=(0,), hint="here the field is logprobs"),
        "add_generation_prompt": _TRUE,
    }
)

# Of one message of a conversation.
UNSUPPORTED_MESSAGE_FIELDS: Mapping[str, UnsupportedField] = MappingProxyType(
    {"tool_calls": _EMPTY_LIST, "function_call": _ONLY_NULL, "audio": _ONLY_NULL, "refusal": _ONLY_NULL}
)

_NOT_HEADER_SAFE = re.compile(r"[^!-~]")


def refuse_unsupported(fields: Mapping[str, Any], table: Mapping[str, UnsupportedField], prefix: str = "") -> None:
    """Raise ApiError for the first of `fields` that is in `table` with a value that asks for something.

    prefix: put before the name in messages, such as "messages[0].".
    """
    for name, value in fields.items():
        if name in table and not table[name].accepts(value):
            raise not_allowed(prefix + name, value, table[name].allowed())


def ignored_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of fields that nobody defines, fit for a header and a log line: the first 16 in alphabetical order, each
    at most 64 visible ASCII characters (others become "?"). O(names).
    """
    first = heapq.nsmallest(MAX_IGNORED, names)
    return tuple(sorted({_NOT_HEADER_SAFE.sub("?", name[:MAX_NAME_LENGTH]) or "?" for name in first}))
