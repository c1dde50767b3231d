"""The work of the storage workers, in pieces of a few pages, and the queues in which it waits."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType, Protocol

from app.errors import IntegrityError
from app.hicache.storage.base import Buffer, Deadline, Got, Operation, PageKey
from app.hicache.storage.value import ValueCodec

Ticket = NewType("Ticket", int)


class MadeLater(Protocol):
    """Bytes that are made by the worker that wants them: `bytes(it)`. Their number is known."""

    def __len__(self) -> int: ...

    def __bytes__(self) -> bytes: ...


Payload = Buffer | MadeLater


class Arrival(NamedTuple):
    """What became of some pages of one request: of its keys first .. first + len(results) - 1."""

    ticket: Ticket
    first: int
    results: Sequence[Got]


Arrived = Callable[[Arrival], None]


class ChunkState(enum.Enum):
    QUEUED = "queued"
    COPYING = "copying"  # a worker reads the caller's bytes
    RUNNING = "running"  # a worker waits for the storage
    SETTLED = "settled"  # the caller was told; whatever comes now is dropped


@dataclass(slots=True, eq=False)
class Chunk:
    """A few keys of one request, served by one call to the storage. Its state changes under the workers' lock."""

    operation: Operation
    ticket: Ticket
    first: int
    keys: Sequence[PageKey]
    payloads: Sequence[Payload]  # of a SET, the caller's until this chunk is settled
    deadline: Deadline
    num_bytes: int
    arrived: Arrived
    codec: ValueCodec | None = None  # of a GET or a SET: of the values
    state: ChunkState = ChunkState.QUEUED


class ChunkQueue:
    """First in, first out, bounded in chunks and in bytes. What was settled while it waited is passed over.

    An empty one takes any chunk: one that is larger than the bound would never be served otherwise.

    Not safe from several threads: its owner has a lock.
    """

    def __init__(self, max_chunks: int, max_bytes: int) -> None:
        self._max_chunks = max_chunks
        self._max_bytes = max_bytes
        self._chunks: deque[Chunk] = deque()
        self.num_chunks = 0
        self.num_bytes = 0

    def has_room(self, chunk: Chunk) -> bool:
        fits = self.num_chunks < self._max_chunks and self.num_bytes + chunk.num_bytes <= self._max_bytes
        return fits or not self.num_chunks

    def push(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self.num_chunks += 1
        self.num_bytes += chunk.num_bytes

    def pop(self) -> Chunk | None:
        """The oldest that still waits; it no longer counts."""
        while self._chunks:
            chunk = self._chunks.popleft()
            if chunk.state is ChunkState.QUEUED:
                self.forget(chunk)
                return chunk
        return None

    def forget(self, chunk: Chunk) -> None:
        """`chunk`, which waits here, is settled or taken."""
        self.num_chunks -= 1
        self.num_bytes -= chunk.num_bytes
        if not self.num_chunks:
            self._chunks.clear()

    def check_integrity(self) -> None:
        waiting = [chunk for chunk in self._chunks if chunk.state is ChunkState.QUEUED]
        real = len(waiting), sum(chunk.num_bytes for chunk in waiting)
        if real != (self.num_chunks, self.num_bytes):
            raise IntegrityError(
                owner="ChunkQueue", broken=f"{real} wait, and {self.num_chunks, self.num_bytes} are counted"
            )
