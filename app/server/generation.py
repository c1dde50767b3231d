"""/v1/completions and /v1/chat/completions: from a body to requests of the engine, and from their tokens to a reply."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple, TypeVar

import numpy as np
import structlog
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.core.ports import Tokenizer
from app.core.sampling import SamplingParams
from app.errors import RequestError
from app.observability.metrics import Metrics
from app.scheduling.request import Request, RequestOutput
from app.server.engine_loop import EngineLoop
from app.server.event_stream import EventStream, unless_disconnected
from app.server.gate import Gate
from app.server.http_body import BodyReader
from app.server.mailbox import Mailbox, whole_part
from app.server.openai_errors import CHAT_FIELDS, COMPLETION_FIELDS, ApiError, from_request_error
from app.server.parsing import Parsed
from app.server.parts import Usage
from app.server.rendering.base import Renderer
from app.server.rendering.chat import ChatRenderer
from app.server.rendering.completions import CompletionRenderer
from app.server.rendering.events import DONE
from app.server.sampling_fields import chat_sampling, completion_sampling, namespace_of, resolve_max_tokens
from app.server.schemas import (
    DEFAULT_COMPLETION_TOKENS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from app.server.served import Served
from app.server.texts import Texts

_log = structlog.get_logger(__name__)
AnyGeneration = TypeVar("AnyGeneration", bound=GenerationRequest)


class _Choices(NamedTuple):
    """What one HTTP request asks of the engine: each prompt with the parameters of each of its n choices."""

    prompts: list[tuple[np.ndarray, list[SamplingParams]]]
    fields: Mapping[str, str]  # the engine's field names as the client knows them


class Generation:
    """Handlers. One instance serves all requests; what belongs to one is in local variables."""

    def __init__(
        self,
        *,
        engine: EngineLoop,
        served: Served,
        tokenizer: Tokenizer,
        texts: Texts,
        bodies: BodyReader,
        gate: Gate,
        metrics: Metrics,
    ) -> None:
        self._engine = engine
        self._served = served
        self._tokenizer = tokenizer
        self._texts = texts
        self._bodies = bodies
        self._gate = gate
        self._metrics = metrics

    async def completions(self, http: HttpRequest) -> Response:
        self._gate.check(1)
        parsed = await self._bodies.read(http, CompletionRequest)
        request = parsed.request
        self._served.check_model(request.model)
        try:
            prompts = [
                await self._texts.encode(prompt) if isinstance(prompt, str) else self._served.check_token_ids(prompt)
                for prompt in request.prompts()
            ]
        except RequestError as error:
            raise from_request_error(error, COMPLETION_FIELDS) from error
        limit = self._served.context_length
        choices = _Choices(
            [
                (
                    prompt,
                    completion_sampling(
                        request,
                        resolve_max_tokens(request.max_tokens, DEFAULT_COMPLETION_TOKENS, prompt.size, limit),
                    ),
                )
                for prompt in prompts
            ],
            COMPLETION_FIELDS,
        )
        return await self._serve(http, parsed, choices, "cmpl", CompletionRenderer)

    async def chat(self, http: HttpRequest) -> Response:
        self._gate.check(1)
        parsed = await self._bodies.read(http, ChatCompletionRequest)
        request = parsed.request
        self._served.check_model(request.model)
        try:
            prompt = await self._texts.encode_chat(
                request.template_messages(), add_generation_prompt=request.add_generation_prompt
            )
        except RequestError as error:
            raise from_request_error(error, CHAT_FIELDS) from error
        max_tokens = resolve_max_tokens(
            request.asked_max_tokens,
            None,
            prompt.size,
            self._served.context_length,
            prompt_field="messages",
            max_tokens_field=request.max_tokens_field,
        )
        choices = _Choices([(prompt, chat_sampling(request, max_tokens))], CHAT_FIELDS)
        return await self._serve(http, parsed, choices, "chatcmpl", ChatRenderer)

    async def _serve(
        self,
        http: HttpRequest,
        parsed: Parsed[AnyGeneration],
        choices: _Choices,
        kind: str,
        make_renderer: Callable[..., Renderer],
    ) -> Response:
        request = parsed.request
        request_id = f"{kind}-{uuid.uuid4().hex}"
        renderer = make_renderer(
            request_id=request_id,
            model=self._served.model,
            created=int(time.time()),
            include_usage=request.wants_usage,
            token_bytes=self._tokenizer.token_bytes,
        )
        requests = self._requests(request_id, request, choices)
        structlog.contextvars.bind_contextvars(request_id=request_id)
        headers = {"x-request-id": request_id}
        if parsed.ignored:
            headers["x-ignored-fields"] = ", ".join(parsed.ignored)
            _log.warning("fields_ignored", fields=parsed.ignored)
        self._gate.check(len(requests))
        mailbox = self._engine.submit(requests)
        if request.stream:
            events = self._events(mailbox, request, renderer)
            return EventStream(events, headers, on_end=lambda: self._engine.abort(mailbox))
        try:
            outputs = await unless_disconnected(http.receive, mailbox.wait_for_all())
        finally:
            self._engine.abort(mailbox)
        usage = _usage(outputs, request)
        _log_end(usage, outputs)
        parts = [whole_part(index, output) for index, output in enumerate(outputs)]
        body = renderer.response(parts, usage)
        return Response(body, headers=headers, media_type="application/json")

    def _requests(self, request_id: str, request: GenerationRequest, choices: _Choices) -> list[Request]:
        """One request a choice, in the order of the choices' numbers. ApiError if one can never be served."""
        namespace = namespace_of(request)
        requests = [
            Request(
                request_id=f"{request_id}-{number}",
                prompt_token_ids=prompt,
                sampling=params,
                namespace=namespace,
                priority=request.priority,
                streams=request.stream,
            )
            for number, (prompt, params) in enumerate(
                (prompt, params) for prompt, each_params in choices.prompts for params in each_params
            )
        ]
        try:
            for each in requests:
                self._served.check(each)
        except RequestError as error:
            raise from_request_error(error, choices.fields) from error
        return requests

    async def _events(self, mailbox: Mailbox, request: GenerationRequest, renderer: Renderer) -> AsyncIterator[bytes]:
        try:
            yield renderer.opening(len(mailbox.request_ids))
            while mailbox.has_more:
                yield b"".join([renderer.chunk(part) for part in await mailbox.next_parts()])
        except ApiError as error:
            self._metrics.refused(error.code or str(error.status))
            _log.warning("request_refused", code=error.code, reason=error.message)
            yield renderer.error(error)
        else:
            outputs = mailbox.all_outputs()
            usage = _usage(outputs, request)
            _log_end(usage, outputs)
            if request.wants_usage:
                yield renderer.usage_chunk(usage)
        yield DONE


def _usage(outputs: list[RequestOutput], request: GenerationRequest) -> Usage:
    """Choices of one prompt lie side by side, n of them."""
    firsts = range(0, len(outputs), request.n)
    least = [min(outputs[first : first + request.n], key=lambda each: each.cached_tokens) for first in firsts]
    by_tier = Counter[str]()
    for output in least:
        by_tier.update(output.cached_by_tier)
    return Usage(
        prompt_tokens=sum(outputs[first].prompt_tokens for first in firsts),
        completion_tokens=sum(len(output.token_ids) for output in outputs),
        cached_tokens=sum(output.cached_tokens for output in least),
        cached_by_source=by_tier if request.return_cached_tokens_details else None,
    )


def _log_end(usage: Usage, outputs: list[RequestOutput]) -> None:
    _log.info(
        "request_finished",
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        finish_reasons=sorted({output.finish_reason for output in outputs}),
    )
