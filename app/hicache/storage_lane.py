"""The storage lane of the host tier: numbered transfers on this side, one storage behind its workers on the other.

    store | lookup | fetch  --->  LaneTransfer: a ticket of the workers for each kind of page  --->  StorageWorkers
    take_ends  <---  all its keys are answered  <---  callbacks in the workers' threads

Pages become bytes, and bytes pages, in the workers' threads: host pages are arrays that nobody writes to.

One storage has three kinds of values, each with a codec of its own: full pages under the hashes of their chain, window
pages and snapshots under keys that `StorageIdentity.part_keys` makes of those.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import structlog

from app.core.keys import StorageIdentity
from app.core.transfers import Fetch, Lookup, OfEachPool, PageKeys, Store
from app.errors import ConfigError, IntegrityError, OwnershipError
from app.hicache.lane_transfer import LaneTransfer
from app.hicache.ports import LaneEnd
from app.hicache.storage.base import Deadline, Got, HiCacheStorage, Operation, Outcome, PageKey
from app.hicache.storage.chunks import Arrival, Arrived, Ticket
from app.hicache.storage.counters import StorageCounters
from app.hicache.storage.value import ValueCodec
from app.hicache.storage.workers import StorageWorkers, WorkerLimits, WorkerLoad
from app.tpu.page_carrier import PageArrays, PageForm, PoolContents

_log = structlog.get_logger(__name__)

_FULL = 0  # the first of each pool
_Ask = Callable[[StorageWorkers, int, Sequence[PageKey], Arrived], Ticket]


class _StoredKind(NamedTuple):
    """Pages of one kind: what they are called, as values, as host pages."""

    identity: StorageIdentity
    codec: ValueCodec
    form: PageForm

    def page(self, got: Got) -> tuple[Outcome, PageArrays | None]:
        """Of what was read. A page that cannot be made did not come."""
        if got.value is None:
            return got.outcome, None
        try:
            return got.outcome, self.form.from_bytes(np.frombuffer(got.value, np.uint8))
        except Exception as error:
            _log.warning("fetched_page_refused", reason=repr(error))
            return Outcome.FAULT, None


@dataclass(frozen=True, slots=True)
class _PageBytes:
    """A host page as bytes, which are made where they are wanted."""

    kind: _StoredKind
    page: PageArrays

    def __len__(self) -> int:
        return self.kind.codec.payload_bytes

    def __bytes__(self) -> bytes:
        return self.kind.form.to_bytes(self.page).tobytes()


class WorkersLane:
    """A StorageLane over one storage at a time, which may come and go while transfers are under way.

    store, lookup, fetch, cancel, take_ends: for the thread that dispatches; they never wait for the storage.
    attach, detach, clear, close and what only looks: for any thread; the middle two may wait.
    """

    def __init__(
        self,
        *,
        page_bytes: OfEachPool[int],
        identities: OfEachPool[StorageIdentity | None],
        forms: OfEachPool[PageForm | None],
        limits: WorkerLimits | None = None,
        store_deadline_s: float = 30.0,
    ) -> None:
        """page_bytes: of one page of each kind. identities, forms: None for a kind that the model lacks.

        store_deadline_s: after which a write that the storage has not answered is given up.
        """
        self._page_bytes = page_bytes
        self._kinds = [
            None if identity is None or form is None else _StoredKind(identity, ValueCodec(identity, num_bytes), form)
            for identity, form, num_bytes in zip(identities, forms, page_bytes, strict=True)
        ]
        self._limits = limits
        self._store_deadline_s = store_deadline_s
        self._lock = threading.Lock()  # guards everything below
        self._workers: StorageWorkers | None = None
        self._last_workers: StorageWorkers | None = None  # of what is attached, or was; for its counters
        self._under_way: dict[int, LaneTransfer] = {}
        self._ended: list[LaneEnd] = []
        self._event: threading.Event | None = None

    # -- transfers ---------------------------------------------------------------------------------------------------

    def store(self, intent: Store, contents: PoolContents) -> None:
        """ValueError, and nothing begun, for another number of pages than of keys."""
        for keys, pages in zip(intent.keys, contents, strict=True):
            if len(keys) != len(pages):
                raise ValueError(f"{len(keys)} keys need as many pages, not {len(pages)}")
        deadline = time.monotonic() + self._store_deadline_s

        def ask(workers: StorageWorkers, kind: int, keys: Sequence[PageKey], arrived: Arrived) -> Ticket:
            stored = self._kind(kind)
            return workers.set(
                stored.codec, keys, [_PageBytes(stored, page) for page in contents[kind]], arrived, deadline
            )

        self._begin(intent.number, Operation.SET, intent.keys, ask)

    def lookup(self, intent: Lookup) -> None:
        deadline = time.monotonic() + intent.deadline_s

        def ask(workers: StorageWorkers, kind: int, keys: Sequence[PageKey], arrived: Arrived) -> Ticket:
            return workers.exists(keys, arrived, deadline)

        self._begin(intent.number, Operation.EXISTS, intent.keys, ask)

    def fetch(self, intent: Fetch) -> None:
        deadline = time.monotonic() + intent.deadline_s

        def ask(workers: StorageWorkers, kind: int, keys: Sequence[PageKey], arrived: Arrived) -> Ticket:
            return workers.get(self._kind(kind).codec, keys, arrived, deadline)

        self._begin(intent.number, Operation.GET, intent.keys, ask)

    def cancel(self, number: int) -> None:
        with self._lock:
            transfer = self._under_way.get(number)
        if transfer is not None and transfer.workers is not None:
            for ticket in transfer.tickets:
                transfer.workers.cancel(ticket)

    def take_ends(self) -> list[LaneEnd]:
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def wake_with(self, event: threading.Event) -> None:
        with self._lock:
            self._event = event
            if self._ended:
                event.set()

    # -- the storage -------------------------------------------------------------------------------------------------

    @property
    def is_attached(self) -> bool:
        with self._lock:
            return self._workers is not None

    def attach(self, storage: HiCacheStorage) -> None:
        """From now on `storage` is asked, and it is closed by `detach`. ConfigError while there is another."""
        with self._lock:
            if self._workers is not None:
                raise ConfigError(field="storage", value=type(storage).__name__, allowed="detach the present one first")
            self._workers = self._last_workers = StorageWorkers(storage, self._limits)

    def detach(self, timeout_s: float) -> None:
        """Let go of the storage. Idempotent; at most twice timeout_s, the storage's own closing included.

        Transfers that begin from now on end as "detached". Reads under way end as failures at once; what is queued
        to be written is written, or dropped when the time is over.
        """
        with self._lock:
            workers, self._workers = self._workers, None
        if workers is not None:
            workers.close(timeout_s)

    def clear(self, deadline: Deadline) -> int:
        """Delete all that the storage has of ours, of whatever identity, and wait for that. -> how many values.

        Fetches under way find what they still find; writes under way may come after. ConfigError without a storage.
        """
        with self._lock:
            workers = self._workers
        if workers is None:
            raise ConfigError(field="storage", value=None, allowed="attach a storage before it is cleared")
        return workers.clear(deadline)

    def close(self, timeout_s: float) -> None:
        """As `detach`: a lane may be used again with another storage."""
        self.detach(timeout_s)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def num_under_way(self) -> int:
        """Transfers that were begun and are not answered."""
        with self._lock:
            return len(self._under_way)

    def counters(self) -> StorageCounters:
        """Of the storage that is attached, or was last."""
        with self._lock:
            workers = self._last_workers
        return StorageCounters() if workers is None else workers.counters()

    def load(self) -> WorkerLoad | None:
        """What the workers have to do; None before there was a storage."""
        with self._lock:
            workers = self._last_workers
        return None if workers is None else workers.load()

    def check_integrity(self) -> None:
        with self._lock:
            workers = self._workers
            for number, transfer in self._under_way.items():
                if number != transfer.number or (broken := transfer.broken()):
                    raise IntegrityError(owner="WorkersLane", broken=broken or f"transfer {number} is kept as another")
        if workers is not None:
            workers.check_integrity()

    # -- one transfer ------------------------------------------------------------------------------------------------

    def _begin(self, number: int, operation: Operation, keys: PageKeys, ask: _Ask) -> None:
        wanted = [self._storage_keys(kind, hashes) for kind, hashes in enumerate(keys)]
        with self._lock:
            if number in self._under_way:
                raise OwnershipError(number=number, reason="a transfer of this number is under way")
            workers = self._workers
            transfer = LaneTransfer(
                number=number, operation=operation, keys=keys, page_bytes=self._page_bytes, workers=workers
            )
            self._under_way[number] = transfer
            self._settle(transfer)
        if workers is None:
            return
        for kind, of_kind in enumerate(wanted):
            if of_kind:
                arrived = partial(self._arrived, transfer, kind)
                transfer.tickets.append(ask(workers, kind, of_kind, arrived))

    def _arrived(self, transfer: LaneTransfer, kind: int, arrival: Arrival) -> None:
        """In any thread."""
        stored = self._kind(kind)
        made = [stored.page(got) for got in arrival.results]  # without the lock: it takes a while
        with self._lock:
            transfer.answer(kind, arrival.first, [outcome for outcome, _ in made], [page for _, page in made])
            self._settle(transfer)

    def _settle(self, transfer: LaneTransfer) -> None:
        """With the lock held: its end can be taken if everything is answered."""
        if transfer.num_unanswered:
            return
        del self._under_way[transfer.number]
        self._ended.append(transfer.end())
        if self._event is not None:
            self._event.set()

    def _kind(self, kind: int) -> _StoredKind:
        found = self._kinds[kind]
        if found is None:
            raise ValueError(f"this model has no {OfEachPool._fields[kind]}")
        return found

    def _storage_keys(self, kind: int, hashes: Sequence[bytes]) -> list[PageKey]:
        if not hashes:
            return []
        identity = self._kind(kind).identity
        keys = hashes if kind == _FULL else identity.part_keys(hashes)
        return [PageKey(each) for each in keys]
