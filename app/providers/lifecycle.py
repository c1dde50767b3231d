"""Opening and closing the one runtime of a container."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dependency_injector import resources

from app.core.ports import ModelRunner
from app.errors import RuntimeClosedError
from app.hicache.host_tier import HostTier
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.req_to_token_pool import ReqToTokenPool
from app.memory.state_slots import StateSlots
from app.memory.window_pages import WindowPagePool
from app.providers.tiers import AttachedStorage
from app.runtime.local import LocalRuntime
from app.runtime.pools import OwnedPool
from app.runtime.row_sampling import RowSampling
from app.runtime.running_states import RunningStates


class Lifecycle:
    """Whether a container may still be used. Once closed it stays closed: nothing opens a second runtime unnoticed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runtime: LocalRuntime | None = None
        self._storage: AttachedStorage | None = None
        self._closed = False

    def open(self, runtime: LocalRuntime, storage: AttachedStorage) -> LocalRuntime:
        """Open `storage`, which may refuse, and then `runtime`; or return the one that is open.

        Safe from several threads. RuntimeClosedError once closed.
        """
        with self._lock:
            if self._closed:
                raise RuntimeClosedError(action="open the runtime")
            if self._runtime is None:
                storage.open()
                try:
                    runtime.open()
                except BaseException:
                    storage.close()
                    raise
                self._runtime, self._storage = runtime, storage
            return self._runtime

    def close(self) -> None:
        """Close what is open, for good: the runtime and what it moves, then the storage. Idempotent."""
        with self._lock:
            self._closed = True
            if self._runtime is not None and self._storage is not None:
                self._runtime.close()
                self._storage.close()


class LocalRuntimeResource(resources.Resource[LocalRuntime]):
    """The container's only Resource: an open runtime, closed by `shutdown_resources()` with all that it owns.

    A class and not a generator: the library does not lock a Resource, so several threads may each start one, and a
    generator that lost would close the runtime when it is collected.
    """

    def init(
        self,
        lifecycle: Lifecycle,
        *,
        allocator: PagedTokenToKVPoolAllocator,
        rows: ReqToTokenPool,
        sampling: RowSampling,
        device_pool: OwnedPool,
        model_runner: ModelRunner,
        window: WindowPagePool | None,
        states: StateSlots | None,
        running_states: RunningStates | None,
        check_room: Callable[[], None],
        tiers: HostTier | None,
        storage: AttachedStorage,
    ) -> LocalRuntime:
        self._lifecycle = lifecycle
        return lifecycle.open(
            LocalRuntime(
                allocator=allocator,
                rows=rows,
                sampling=sampling,
                device_pool=device_pool,
                model_runner=model_runner,
                window=window,
                states=states,
                running_states=running_states,
                check_room=check_room,
                tiers=tiers,
            ),
            storage,
        )

    def shutdown(self, resource: LocalRuntime | None) -> None:
        self._lifecycle.close()
