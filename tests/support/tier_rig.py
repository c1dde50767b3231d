"""A runtime with a host tier and without a scheduler: plans of one's own, and what each page of each tier holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from app.core.batch import BatchCompletion, BatchPlan, BatchPlanBuilder, PreparedBatch
from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.core.transfers import (
    Backup,
    OfEachPool,
    PageCounts,
    PageIds,
    Restore,
    TierLimits,
    TransferEnd,
    TransferPlan,
)
from app.hicache.host_tier import HostTier
from app.memory.host_kv_pool import HostKVPool
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.providers import device, hybrid
from app.providers.testing import Override, overridden
from app.runtime.local import LocalRuntime
from app.tpu.cpu_fake import fake_model_config
from app.tpu.page_carrier import PageArrays, PoolContents
from app.tpu.tier_copies import DeviceCopies, TierCopies, TierCopy
from tests.support.engine import CONTEXT_LENGTH, VOCAB_SIZE, server_args
from tests.support.runtime import RuntimeRig, ints
from tests.support.scripted_lane import ScriptedLane

PAGE_SIZE = 4
HOST = CacheIdentity(RuntimeId("host"), Generation(1))
KINDS = ("full", "window", "states")


class TierRig(RuntimeRig):
    """An open LocalRuntime with a HostTier over a scripted lane.

    A page holds one value, in every element of all its arrays: `fill` writes it, `device_value` and `host_value` read.
    """

    def __init__(
        self, container: Any, runtime: LocalRuntime, *, tiers: HostTier, host: HostKVPool, lane: Any, carriers: Any
    ) -> None:
        super().__init__(container, runtime)
        self.tiers = tiers
        self.host = host
        self.lane = lane
        self.carriers = carriers
        self.pool = container.device_pool()
        self.numbers = itertools.count(1)
        self.device_allocators = OfEachPool(self.allocator, container.window_allocator(), container.state_allocator())
        self.ended: dict[int, TransferEnd] = {}

    def allocate(self, *counts: int) -> PageIds:
        """Device pages that are in the test's hands, as a cache's would be."""
        counts = PageCounts(*counts)
        return PageIds(
            *(
                ints() if allocator is None else allocator.allocate(count)
                for allocator, count in zip(self.device_allocators, counts, strict=True)
            )
        )

    def fill(self, ids: PageIds, value: int) -> None:
        """The first page of each kind gets `value`, the next one more, and so on."""
        buffers = self.pool.take()
        for kind, pages in enumerate(ids):
            for offset, page in enumerate(pages.tolist()):
                filled = _filled(self._of(buffers, kind), page, value + offset)
                buffers = self._with(buffers, kind, filled)
        self.pool.put(buffers)

    def device_values(self, ids: PageIds) -> list[list[int]]:
        """What the pages of each kind hold."""
        buffers = self.pool.take()
        self.pool.put(buffers)
        values = []
        for kind, pages in enumerate(ids):
            arrays = [np.asarray(array) for array in jax.tree.leaves(self._of(buffers, kind))] if pages.size else []
            values.append([_only_value([array[page] for array in arrays]) for page in pages.tolist()])
        return values

    def host_values(self, ids: PageIds) -> list[list[int]]:
        return [[_only_value(page) for page in pages] for pages in self.host.get(ids)]

    def device_bytes(self, ids: PageIds) -> list[bytes]:
        """What full pages hold, whatever it is."""
        buffers = self.pool.take()
        self.pool.put(buffers)
        arrays = [np.asarray(array) for array in jax.tree.leaves(self._of(buffers, 0))]
        return [b"".join(array[page].tobytes() for array in arrays) for page in ids.pages.tolist()]

    def host_bytes(self, ids: PageIds) -> list[bytes]:
        """The same of host pages, of a pool with one layer of keys and values."""
        return [b"".join(np.asarray(array).tobytes() for array in page) for page in self.host.get(ids).pages]

    def counts(self, *counts: int) -> PageCounts:
        return PageCounts(*counts)

    def free_counts(self) -> list[int]:
        """Free device pages of each kind."""
        return [0 if each is None else each.num_free for each in self.device_allocators]

    def any_contents(self, *counts: int) -> PoolContents:
        """Of host pages, zeros."""
        return OfEachPool(
            *(
                [] if carrier is None else [carrier.from_bytes(np.zeros(carrier.page_bytes, np.uint8))] * count
                for carrier, count in zip(self.carriers, counts, strict=True)
            )
        )

    def read(self, unread: list[Any], tokens: list[int]) -> None:
        """The oldest step: its ends, and the token of its one row."""
        completion = unread.pop(0).wait()
        self.note(completion)
        tokens += completion.token_ids.tolist()

    def until_read(self, unread: list[Any], tokens: list[int]) -> None:
        while unread:
            self.read(unread, tokens)

    def backup(self, source: PageIds) -> Backup:
        return Backup(number=next(self.numbers), source=source)

    def restore(self, source: PageIds) -> Restore:
        return Restore(number=next(self.numbers), source=source)

    def free_device(self, ids: PageIds) -> None:
        for allocator, pages in zip(self.device_allocators, ids, strict=True):
            if allocator is not None:
                allocator.port.free(pages)

    def free_host(self, ids: PageIds) -> None:
        for allocator, pages in zip(self.host.allocators, ids, strict=True):
            if allocator is not None:
                allocator.port.free(pages)

    def host_frees(self) -> PageIds:
        """As control would send them."""
        return PageIds(*(ints() if each is None else each.port.recorded_frees() for each in self.host.allocators))

    def builder(self) -> BatchPlanBuilder:
        builder = BatchPlanBuilder(self.runtime.identity)
        frees = [ints() if each is None else each.port.recorded_frees() for each in self.device_allocators]
        builder.free(*frees)
        return builder

    def plan(self, **transfers: Any) -> BatchPlan:
        """Without rows."""
        builder = self.builder()
        builder.transfer(self.transfers(**transfers))
        return builder.build()

    def transfers(self, **fields: Any) -> TransferPlan:
        return TransferPlan(free_host=self.host_frees(), **fields)

    def move(self, **transfers: Any) -> tuple[PreparedBatch, BatchCompletion]:
        """One plan without rows, settled."""
        prepared, completion = self.run(self.plan(**transfers))
        self.note(completion)
        return prepared, completion

    def note(self, completion: BatchCompletion) -> None:
        """No transfer ends twice."""
        for end in completion.transfers:
            assert end.number not in self.ended, end
            self.ended[end.number] = end

    def until(self, *numbers: int, max_plans: int = 400) -> list[TransferEnd]:
        """Plans without rows until these have ended."""
        for _ in range(max_plans):
            if all(number in self.ended for number in numbers):
                return [self.ended[number] for number in numbers]
            self.move(wait_s=0.01)
        raise AssertionError(f"{set(numbers) - set(self.ended)} have not ended within {max_plans} plans")

    def backed_up(self, source: PageIds) -> PageIds:
        """Host pages with the content of these device pages."""
        backup = self.backup(source)
        prepared, _ = self.move(backups=(backup,))
        (end,) = self.until(backup.number)
        assert end.failure is None
        (target,) = prepared.transfers.backups
        return target

    def check(self) -> None:
        self.runtime.check_integrity()

    def _of(self, buffers: Any, kind: int) -> Any:
        return getattr(buffers, KINDS[kind]) if self.container.model_config().is_hybrid else buffers

    def _with(self, buffers: Any, kind: int, arrays: Any) -> Any:
        return buffers._replace(**{KINDS[kind]: arrays}) if self.container.model_config().is_hybrid else arrays


@jax.jit
def _filled(arrays: Any, page: int, value: int) -> Any:
    return jax.tree.map(lambda array: array.at[page].set(jnp.asarray(value).astype(array.dtype)), arrays)


class LandedCopies:
    """Copies that are over when they have begun."""

    def __init__(self, copies: TierCopies) -> None:
        self._copies = copies

    def to_host(self, contents: PoolContents) -> TierCopy:
        return self._over(self._copies.to_host(contents))

    def to_device(self, contents: PoolContents) -> TierCopy:
        return self._over(self._copies.to_device(contents))

    @staticmethod
    def _over(copy: TierCopy) -> TierCopy:
        copy.result()
        return copy


class BrokenScatters:
    """A carrier whose first few writes lose the arrays, as a device that fails does."""

    def __init__(self, carrier: Any, num_broken: int) -> None:
        self._carrier = carrier
        self.num_broken = num_broken
        self.page = carrier.page
        self.page_bytes = carrier.page_bytes
        self.gather = carrier.gather
        self.groups = carrier.groups
        self.to_host = carrier.to_host
        self.to_device = carrier.to_device
        self.to_bytes = carrier.to_bytes
        self.from_bytes = carrier.from_bytes

    @property
    def num_programs(self) -> int:
        return self._carrier.num_programs

    def scatter(self, buffers: Any, pages: np.ndarray, contents: Sequence[PageArrays]) -> Any:
        if not self.num_broken:
            return self._carrier.scatter(buffers, pages, contents)
        self.num_broken -= 1
        for array in jax.tree.leaves(buffers):
            array.delete()
        raise RuntimeError("injected failure of a scatter")


def _only_value(arrays: Any) -> int:
    values = {float(value) for array in jax.tree.leaves(arrays) for value in np.unique(np.asarray(array))}
    assert len(values) == 1, f"a page of several values: {values}"
    return int(values.pop())


@contextmanager
def opened_tiers(
    *,
    host_pages: int = 16,
    staging_pages: int = 64,
    deadline_s: float = 30.0,
    hybrid_model: bool = False,
    copies: Callable[[TierCopies], TierCopies] = lambda copies: copies,
    lane: Any = None,
    overrides: dict[str, Override] | None = None,
    clock: Callable[[], float] | None = None,
    broken_scatters: int | None = None,
    **fields: Any,
) -> Iterator[TierRig]:
    """host_pages: of each kind. staging_pages: full pages that fit in. copies: wraps the real ones.

    broken_scatters: how many writes of restored pages break the pool; None when it cannot be broken.
    hybrid_model: with sliding windows and recurrent states. `fields` are those of ServerArgs.
    """
    shape: dict[str, Any] = {"window": 10, "recurrent": True} if hybrid_model else {}
    model = fake_model_config(vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH, **shape)
    sizes = {"page_size": PAGE_SIZE, "max_total_tokens": 32 * PAGE_SIZE, "max_running_requests": 4}
    args = server_args(**{**sizes, **({"max_recurrent_snapshots": 12} if hybrid_model else {}), **fields})
    with overridden(args, fake=True, model=model, **(overrides or {})) as container:
        carriers = device.page_carriers(
            container.pool_spec(), container.hybrid_spec(), container.mesh(), container.attention(), model
        )
        if broken_scatters is not None:
            carriers = carriers._replace(pages=BrokenScatters(carriers.pages, broken_scatters))
        page_sizes = OfEachPool(PAGE_SIZE, PAGE_SIZE, 1)
        host = HostKVPool(
            allocators=OfEachPool(
                *(
                    None if carrier is None else PagedTokenToKVPoolAllocator(host_pages, page_size, HOST)
                    for carrier, page_size in zip(carriers, page_sizes, strict=True)
                )
            ),
            carriers=carriers,
        )
        page_bytes = OfEachPool(*(0 if carrier is None else carrier.page_bytes for carrier in carriers))
        limits = TierLimits(
            page_bytes=page_bytes, staging_bytes=staging_pages * max(page_bytes), copy_deadline_s=deadline_s
        )
        lane = lane or ScriptedLane()
        timing: dict[str, Any] = {} if clock is None else {"clock": clock}
        tiers = HostTier(
            host_pool=host,
            carriers=carriers,
            device_pool=container.device_pool(),
            limits=limits,
            lane=lane,
            copies=copies(DeviceCopies(carriers)),
            **timing,
        )
        runtime = LocalRuntime(
            allocator=container.token_allocator(),
            rows=container.req_to_token_pool(),
            sampling=container.row_sampling(),
            device_pool=container.device_pool(),
            model_runner=container.model_runner(),
            window=container.window_pages(),
            states=hybrid.state_slots(container.state_allocator()),
            running_states=hybrid.running_states(container.state_spec(), container.device_pool()),
            check_room=container.room_check(),
            tiers=tiers,
        )
        runtime.open()
        try:
            yield TierRig(container, runtime, tiers=tiers, host=host, lane=lane, carriers=carriers)
        finally:
            runtime.close()
