"""Request bodies: read within a size and a time, and checked against a schema."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from app.server.event_stream import Disconnected
from app.server.openai_errors import body_too_large, request_timeout, unsupported_media_type
from app.server.parsing import Parsed, parse_body
from app.server.texts import Texts

Schema = TypeVar("Schema", bound=msgspec.Struct)
# Smaller bodies are parsed in less time than another thread takes to be asked.
_PARSE_HERE_BYTES = 64 * 1024


class BodyReader:
    def __init__(self, texts: Texts, *, max_bytes: int, timeout_s: float) -> None:
        self._texts = texts
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s

    async def read(self, http: Request, schema: type[Schema]) -> Parsed[Schema]:
        """The body as `schema`. ApiError: 408, 413, 415, or 400 naming the field."""
        content_type = http.headers.get("content-type", "")
        if content_type.partition(";")[0].strip().lower() != "application/json":
            # Nothing else either because a page of another site may send other types here without being asked.
            raise unsupported_media_type(content_type)
        return await self._parse(await self._bytes(http), schema)

    async def read_optional(self, http: Request, schema: type[Schema]) -> Parsed[Schema]:
        """The same, where an empty body stands for one that says nothing."""
        if http.headers.get("content-length", "0") == "0" and "transfer-encoding" not in http.headers:
            return parse_body(b"{}", schema)
        return await self.read(http, schema)

    async def _bytes(self, http: Request) -> bytes:
        stated = http.headers.get("content-length", "")
        if stated.isdecimal() and int(stated) > self._max_bytes:
            raise body_too_large(self._max_bytes)
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self._timeout_s):
                async for chunk in http.stream():
                    size += len(chunk)
                    if size > self._max_bytes:
                        raise body_too_large(self._max_bytes)
                    chunks.append(chunk)
        except TimeoutError:
            raise request_timeout(self._timeout_s) from None
        except ClientDisconnect:
            raise Disconnected from None
        return b"".join(chunks)

    async def _parse(self, raw: bytes, schema: type[Schema]) -> Parsed[Schema]:
        if len(raw) <= _PARSE_HERE_BYTES:
            return parse_body(raw, schema)
        return await self._texts.run(lambda: parse_body(raw, schema))
