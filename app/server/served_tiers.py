"""The tiers below the device pool of one server: how they stand, and the storage that comes and goes.

event loop: EngineLoop.ask(control)    what is asked of the storage, between two steps
a worker thread                        opening, emptying, closing it, which may wait
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from app.caches.tiers.ports import CacheTiers
from app.config.server_args import ServerArgs
from app.core.keys import Namespace
from app.errors import ConfigError
from app.hicache.host_tier import HostTier
from app.hicache.storage_lane import WorkersLane
from app.observability.tier_metrics import TierCollector
from app.providers.tiers import AttachedStorage, check_backend, storage_opener
from app.server.engine_loop import EngineLoop
from app.server.openai_errors import ApiError, conflict, not_allowed
from app.server.schemas import AttachStorageRequest
from app.server.tier_state import TierReading, figures_of, state_of, storage_state

_PATIENCE_S = 0.5  # for the engine's thread, which may be compiling; an older reading is told then


class TierParts:
    """What a server takes of an engine that has tiers."""

    def __init__(
        self,
        *,
        args: ServerArgs,
        page_size: int,
        control: CacheTiers,
        mover: HostTier,
        lane: WorkersLane,
        storage: AttachedStorage,
        seed: Callable[[Namespace], bytes],
    ) -> None:
        """args: what the storage was opened with, if there is one. seed: what starts the chains of its keys."""
        self.args = args
        self.control = control
        self.storage = storage
        self.seed = seed
        self._page_size = page_size
        self._mover = mover
        self._lane = lane

    def read(self) -> TierReading:
        """On the engine's thread, or while there is none."""
        return TierReading(
            page_size=self._page_size,
            control=self.control.counters(),
            moved=self._mover.counters(),
            storage=self._lane.counters(),
            load=self._lane.load(),
            is_attached=self._lane.is_attached,
        )


class ServedTiers:
    """On the event loop. One change of the storage at a time."""

    def __init__(self, engine: EngineLoop, parts: TierParts) -> None:
        """Before the engine is started."""
        self._engine = engine
        self._parts = parts
        self._args = parts.args
        self._reading = parts.read()
        self._changing = asyncio.Lock()
        self.collector = TierCollector(figures_of(self._reading))

    async def refresh(self) -> TierReading:
        """How things stand, or stood when the engine last had a moment."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                self._reading = await self._engine.ask(self._parts.read)
        except (TimeoutError, ApiError):
            return self._reading
        self.collector.measured(figures_of(self._reading))
        return self._reading

    async def state(self) -> dict[str, Any]:
        """Of all tiers, for /server_info."""
        return state_of(await self.refresh())

    async def storage_state(self) -> dict[str, Any]:
        """Of the storage, and how full it is."""
        told = storage_state(await self.refresh())
        told["backend"] = told["path"] = told["usage"] = None
        if told["attached"]:
            told |= {"backend": self._args.hicache_storage_backend, "path": self._args.hicache_storage_path}
            told["usage"] = await asyncio.to_thread(self._usage)
        return told

    async def attach(self, request: AttachStorageRequest) -> None:
        """ApiError: 409 while there is a storage, 400 where this one cannot be had."""
        async with self._changing:
            if self._parts.storage.storage is not None:
                raise conflict(f"{self._args.hicache_storage_backend} is attached: detach it first")
            with _told_to_the_client():
                with_storage = _with_storage(self._parts.args, request)
                opening = storage_opener(with_storage)
                assert opening is not None  # it was named
                await asyncio.to_thread(self._parts.storage.attach, opening)
            await self._tell(lambda: self._parts.control.attach_storage(self._parts.seed))
            self._args = with_storage

    async def detach(self) -> bool:
        """What is queued to be written is, within a time. -> whether there was a storage."""
        async with self._changing:
            had_one = self._parts.storage.storage is not None
            await self._engine.ask(self._parts.control.detach_storage)
            await asyncio.to_thread(self._parts.storage.close)
            return had_one

    async def clear(self, timeout_s: float) -> int:
        """-> values that were deleted. ApiError: 409 where there is no storage."""
        async with self._changing:
            if self._parts.storage.storage is None:
                raise conflict("no storage is attached: there is nothing to clear")
            cleared = await asyncio.to_thread(self._parts.storage.clear, timeout_s)
            # What control knew of its keys is true no more.
            await self._engine.ask(lambda: self._parts.control.attach_storage(self._parts.seed))
            return cleared

    async def _tell(self, change: Callable[[], None]) -> None:
        """Control takes a storage that was just opened; it is closed if nobody is there to take it."""
        try:
            await self._engine.ask(change)
        except BaseException:
            await asyncio.to_thread(self._parts.storage.close)
            raise

    def _usage(self) -> dict[str, int] | None:
        storage = self._parts.storage.storage
        usage = None if storage is None else storage.usage()
        return None if usage is None else usage._asdict()


def _with_storage(args: ServerArgs, request: AttachStorageRequest) -> ServerArgs:
    options = request.hicache_storage_options
    changed = replace(
        args,
        hicache_storage_backend=request.hicache_storage_backend,
        hicache_storage_path=request.hicache_storage_path,
        hicache_storage_size=request.hicache_storage_size,
        hicache_storage_options=json.dumps(options) if options else "",
    )
    check_backend(changed)
    return changed


@contextmanager
def _told_to_the_client() -> Iterator[None]:
    """A ConfigError is the client's mistake: ApiError (400) under the body's field name, which is the flag's."""
    try:
        yield
    except ConfigError as error:
        field = str(error.fields["field"]).removeprefix("--").replace("-", "_")
        raise not_allowed(field, error.fields["value"], str(error.fields["allowed"])) from error
