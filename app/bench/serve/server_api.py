"""The server's routes around the measuring: what it is, tokens of a prompt, emptying the cache."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from app.bench.serve.failures import BenchServerError
from app.bench.serve.settings import Target
from app.bench.serve.wire import ModelEntry, ModelList, ServerInfo, Tokenized, as_object, error_text
from app.errors import ConfigError

if TYPE_CHECKING:
    import httpx

Body = TypeVar("Body")

_FLUSH_WAIT_S = 30.0  # for the last steps of requests whose replies have already ended
_SIDE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """context_length: most tokens of prompt and reply. page_size: None when the server does not say.

    info: all of /server_info; empty when the server has no such route.
    """

    model: str
    context_length: int
    page_size: int | None
    cache_type: str | None
    info: dict[str, Any]


@asynccontextmanager
async def open_http(target: Target) -> AsyncIterator[httpx.AsyncClient]:
    """A connection pool without a limit of its own and without a proxy: neither is to be measured."""
    import httpx

    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **bearer(target.api_key)}
    async with httpx.AsyncClient(
        base_url=target.url.rstrip("/"),
        headers=headers,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=httpx.Timeout(None, connect=10.0),  # the client has a limit for the whole request
        trust_env=False,
    ) as http:
        yield http


def bearer(key: str | None) -> dict[str, str]:
    """The header that shows a key, if there is one."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


class ServerApi:
    """Every verb but `answers` raises BenchServerError when the server refuses, is gone or answers something else."""

    def __init__(self, http: httpx.AsyncClient, target: Target) -> None:
        self._http = http
        self._target = target
        self._admin_headers = bearer(target.admin_api_key)

    async def describe(self) -> ServerFacts:
        """Raises ConfigError when the server has not the model that was asked for."""
        models = _decoded(await self._call("GET", "/v1/models"), "/v1/models", self._target.url, ModelList).data
        model = self._chosen(models)
        info = await self._info()
        try:
            known = msgspec.convert(info, ServerInfo)
        except msgspec.ValidationError as error:
            raise BenchServerError(url=self._target.url, reason=f"has a /server_info that is odd: {error}") from error
        context_length = model.max_model_len or known.max_model_len or known.context_length
        if context_length is None:
            raise BenchServerError(
                url=self._target.url,
                reason="does not say how long a request may be: neither max_model_len in /v1/models, nor in "
                "/server_info",
            )
        return ServerFacts(
            model=model.id,
            context_length=context_length,
            page_size=known.page_size,
            cache_type=known.cache_type,
            info=info,
        )

    async def tokenize(self, model: str, messages: list[dict[str, str]]) -> list[int]:
        """The token ids of a chat, with what asks for the reply at its end."""
        body = {"model": model, "messages": messages, "add_generation_prompt": True}
        content = await self._call("POST", "/tokenize", body)
        return _decoded(content, "/tokenize", self._target.url, Tokenized).tokens

    async def flush(self) -> None:
        """Empty the cache. Nothing may be running."""
        await self._call("POST", "/flush_cache", {"timeout": _FLUSH_WAIT_S}, self._admin_headers)

    async def answers(self) -> bool:
        """Whether there is still a server, whatever it says."""
        import httpx

        try:
            await self._http.get("/health", timeout=10.0)
        except httpx.HTTPError:
            return False
        return True

    def _chosen(self, models: list[ModelEntry]) -> ModelEntry:
        names = [model.id for model in models]
        if not models:
            raise BenchServerError(url=self._target.url, reason="lists no model in /v1/models")
        if self._target.model is None:
            return models[0]
        if self._target.model not in names:
            raise ConfigError(field="model", value=self._target.model, allowed=f"one of {', '.join(names)}")
        return models[names.index(self._target.model)]

    async def _info(self) -> dict[str, Any]:
        import httpx

        try:
            response = await self._http.get("/server_info", headers=self._admin_headers, timeout=_SIDE_TIMEOUT_S)
            if response.status_code == 404:
                return {}  # another server: it can be measured, without the ideal hit rate
            return as_object(self._checked("/server_info", response))
        except (httpx.HTTPError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._failed("/server_info", error) from error

    async def _call(
        self, method: str, path: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None
    ) -> bytes:
        import httpx

        content = None if body is None else msgspec.json.encode(body)
        try:
            response = await self._http.request(method, path, content=content, headers=headers, timeout=_SIDE_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise self._failed(path, error) from error
        return self._checked(path, response)

    def _checked(self, path: str, response: httpx.Response) -> bytes:
        if response.status_code != 200:
            hint = "; give --api-key or --admin-api-key" if response.status_code in (401, 403) else ""
            raise BenchServerError(
                url=self._target.url,
                reason=f"refused {path} with status {response.status_code}: {error_text(response.content)}{hint}",
            )
        return response.content

    def _failed(self, path: str, error: Exception) -> BenchServerError:
        reason = str(error) or type(error).__name__
        return BenchServerError(url=self._target.url, reason=f"could not be asked for {path}: {reason}")


class CountedMessages:
    """Token ids of chats, asked for once each."""

    def __init__(self, api: ServerApi, model: str) -> None:
        self._api = api
        self._model = model
        self._known: dict[bytes, list[int]] = {}

    async def token_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Belongs to this object: do not change it."""
        key = msgspec.json.encode(messages)
        if key not in self._known:
            self._known[key] = await self._api.tokenize(self._model, messages)
        return self._known[key]


def _decoded(content: bytes, path: str, url: str, form: type[Body]) -> Body:
    try:
        return msgspec.json.decode(content, type=form)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchServerError(url=url, reason=f"answers {path} in another form: {error}") from error
