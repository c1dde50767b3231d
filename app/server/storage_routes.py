"""What an operator does with the storage while the server runs: look at it, attach, detach and empty it."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from app.server.http_body import BodyReader
from app.server.openai_errors import conflict
from app.server.replies import json_response
from app.server.schemas import AttachStorageRequest, ClearStorageRequest
from app.server.served_tiers import ServedTiers


class StorageRoutes:
    def __init__(self, *, tiers: ServedTiers | None, bodies: BodyReader) -> None:
        """tiers: None where the engine has none; then every route answers 409."""
        self._tiers = tiers
        self._bodies = bodies

    async def show(self, _http: HttpRequest) -> Response:
        return json_response(await self._served().storage_state())

    async def attach(self, http: HttpRequest) -> Response:
        """Open a storage and use it for what is cached from now on; what it has is found by waiting requests."""
        request = (await self._bodies.read(http, AttachStorageRequest)).request
        tiers = self._served()
        await tiers.attach(request)
        return json_response(await tiers.storage_state())

    async def detach(self, _http: HttpRequest) -> Response:
        """Write or drop what is queued, and close it. No error if there is none."""
        return json_response({"detached": await self._served().detach()})

    async def clear(self, http: HttpRequest) -> Response:
        """Delete all of our values in it, other servers' too."""
        request = (await self._bodies.read_optional(http, ClearStorageRequest)).request
        return json_response({"cleared_values": await self._served().clear(request.timeout)})

    def _served(self) -> ServedTiers:
        if self._tiers is None:
            raise conflict("this server has no tiers: start it with --enable-hierarchical-cache")
        return self._tiers
