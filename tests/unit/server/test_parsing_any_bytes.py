"""Whatever comes in: a request or a refusal of 400, and never anything else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.server.known_fields import UNSUPPORTED_FIELDS
from app.server.openai_errors import ApiError
from app.server.parsing import Parsed, parse_body
from app.server.sampling_fields import chat_sampling, completion_sampling, namespace_of
from app.server.schemas import (
    AbortRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    FlushRequest,
    TokenizeRequest,
)

SCHEMAS = [CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest, AbortRequest, FlushRequest]
VALID: dict[str, Any] = {
    "model": "m",
    "prompt": ["a", "b"],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    "tokens": [1, 2],
    "rid": "r",
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "logit_bias": {"7": 1.5},
    "seed": 3,
}
FIELDS = sorted({*VALID, *UNSUPPORTED_FIELDS, *(name for schema in SCHEMAS for name in schema.__struct_fields__)})

# surrogates too: json.dumps writes them as \u escapes
any_text = st.text(st.characters(codec=None), max_size=8)
numbers = st.integers() | st.floats() | st.sampled_from([0, -1, 2**31, 2**63, 2**70, 1e308])
json_values = st.recursive(
    st.none() | st.booleans() | numbers | any_text,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(any_text, inner, max_size=4),
    max_leaves=12,
)
near_misses = st.sampled_from(
    [[], {}, "", [""], [[]], [None], [True], {"type": "text"}, [{"role": "user"}], {"7": None}, {"include_usage": 0}]
)


def outcome(raw: bytes, schema: type[msgspec.Struct]) -> Parsed[Any] | ApiError:
    """What parse_body made of it. Fails for a refusal that a client could not read."""
    try:
        return parse_body(raw, schema)
    except ApiError as error:
        refused = error
    assert refused.status == 400
    assert json.loads(refused.body())["error"]["message"] == refused.message
    assert len(refused.message) < 1000
    return refused


def valid_for(schema: type[msgspec.Struct]) -> dict[str, Any]:
    not_together = {"prompt"} if schema is TokenizeRequest else set()
    return {name: VALID[name] for name in schema.__struct_fields__ if name in VALID and name not in not_together}


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_bodies_that_are_changed_below_are_valid(schema: type[msgspec.Struct]) -> None:
    assert isinstance(outcome(json.dumps(valid_for(schema)).encode(), schema), Parsed)


@pytest.mark.parametrize("schema", SCHEMAS)
@settings(deadline=None, max_examples=100)
@given(raw=st.binary(max_size=64) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_read_or_refused(schema: type[msgspec.Struct], raw: bytes) -> None:
    assert isinstance(outcome(raw, schema), Parsed | ApiError)


@pytest.mark.parametrize("schema", SCHEMAS)
@settings(deadline=None, max_examples=100)
@given(changes=st.dictionaries(st.sampled_from(FIELDS) | any_text, json_values | near_misses, max_size=4))
def test_a_valid_body_with_changed_fields_is_read_or_refused(
    schema: type[msgspec.Struct], changes: dict[str, Any]
) -> None:
    read = outcome(json.dumps({**valid_for(schema), **changes}).encode(), schema)

    assert isinstance(read, ApiError) or isinstance(read.request, schema)


@pytest.mark.parametrize("schema", [CompletionRequest, ChatCompletionRequest])
@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_what_was_read_has_parameters_for_the_engine(schema: type[msgspec.Struct], data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(schema.__struct_fields__), max_size=4))
    changes = {name: data.draw(json_values | near_misses | numbers) for name in names}
    read = outcome(json.dumps({**valid_for(schema), **changes}).encode(), schema)
    if isinstance(read, ApiError):
        return

    assert len(namespace_of(read.request).seed()) == 32
    sampling = completion_sampling if schema is CompletionRequest else chat_sampling
    # The schema's limits are as narrow as the engine's: what was read is never refused by it.
    assert len(sampling(read.request, 2**31 - 1)) == read.request.n


@settings(deadline=None, max_examples=100)
@given(position=st.integers(0, 10_000), replacement=st.binary(max_size=4))
def test_a_valid_body_with_changed_bytes_is_read_or_refused(position: int, replacement: bytes) -> None:
    raw = json.dumps(VALID).encode()
    cut = position % len(raw)

    assert isinstance(outcome(raw[:cut] + replacement + raw[cut + 1 :], ChatCompletionRequest), Parsed | ApiError)
