"""/tokenize, /detokenize and /v1/models: the tokenizer and the model's name, without the engine."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.errors import RequestError
from app.server.http_body import BodyReader
from app.server.openai_errors import CHAT_FIELDS, from_request_error
from app.server.rendering.bodies import DetokenizeReply, ModelCard, ModelList, TokenizeReply
from app.server.replies import json_response
from app.server.schemas import DetokenizeRequest, TokenizeRequest
from app.server.served import Served
from app.server.texts import Texts


class TokenRoutes:
    def __init__(self, *, served: Served, texts: Texts, bodies: BodyReader) -> None:
        self._served = served
        self._texts = texts
        self._bodies = bodies

    async def tokenize(self, http: HttpRequest) -> Response:
        request = (await self._bodies.read(http, TokenizeRequest)).request
        self._served.check_model(request.model)
        try:
            if request.messages is not None:
                tokens = await self._texts.encode_chat(
                    [message.for_template() for message in request.messages],
                    add_generation_prompt=request.add_generation_prompt,
                )
            else:
                tokens = await self._texts.encode(request.prompt or "")
        except RequestError as error:
            raise from_request_error(error, CHAT_FIELDS if request.messages is not None else {}) from error
        return json_response(
            TokenizeReply(count=tokens.size, max_model_len=self._served.context_length, tokens=tokens.tolist())
        )

    async def detokenize(self, http: HttpRequest) -> Response:
        request = (await self._bodies.read(http, DetokenizeRequest)).request
        self._served.check_model(request.model)
        try:
            self._served.check_token_ids(request.tokens)
        except RequestError as error:
            raise from_request_error(error, {"prompt_token_ids": "tokens"}) from error
        return json_response(DetokenizeReply(prompt=await self._texts.decode(request.tokens)))

    async def models(self, _http: HttpRequest) -> Response:
        return json_response(ModelList(data=[self._card()]))

    async def model(self, http: HttpRequest) -> Response:
        self._served.check_model(http.path_params["model"])
        return json_response(self._card())

    def _card(self) -> ModelCard:
        return ModelCard(
            id=self._served.model,
            owned_by="tpukv",
            created=self._served.created,
            max_model_len=self._served.context_length,
        )
