"""What the workers make of one chunk: calls to the storage, with the codec between, whatever the storage does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import structlog

from app.hicache.storage.base import BAD_VALUES, Deadline, Got, HiCacheStorage, Operation, Outcome, PageKey, Parts
from app.hicache.storage.chunks import Chunk
from app.hicache.storage.value import ValueCodec

_log = structlog.get_logger(__name__)

FAILURES = frozenset({Outcome.FAULT, Outcome.LATE})
"""What speaks against the storage, and not against one value."""

Call = Callable[[Sequence[int]], list[Got]]
"""Serves the keys at these positions of a chunk; a result for each."""


class StorageVerbs:
    """One storage behind codecs. Never raises: a backend that raises, or answers for too few keys, is a FAULT."""

    def __init__(self, storage: HiCacheStorage) -> None:
        self._storage = storage
        self._preparing: dict[Operation, Callable[[Chunk], Call]] = {
            Operation.EXISTS: self._exists,
            Operation.GET: self._get,
            Operation.SET: self._set,
            Operation.DELETE: self._delete,
        }

    def prepare(self, chunk: Chunk) -> Call:
        """Copies what is to be written, so that the call reads nothing of the caller's."""
        try:
            call = self._preparing[chunk.operation](chunk)
        except Exception:
            _log.exception("page_copy_failed", operation=chunk.operation)
            return lambda positions: [Got(Outcome.FAULT)] * len(positions)

        def guarded(positions: Sequence[int]) -> list[Got]:
            try:
                results = call(positions)
            except Exception:
                _log.exception("storage_backend_raised", operation=chunk.operation)
                return [Got(Outcome.FAULT)] * len(positions)
            return results if len(results) == len(positions) else [Got(Outcome.FAULT)] * len(positions)

        return guarded

    def _exists(self, chunk: Chunk) -> Call:
        def call(positions: Sequence[int]) -> list[Got]:
            keys = [chunk.keys[position] for position in positions]
            return [Got(outcome) for outcome in self._storage.exists(keys, chunk.deadline)]

        return call

    def _get(self, chunk: Chunk) -> Call:
        codec = _codec_of(chunk)

        def call(positions: Sequence[int]) -> list[Got]:
            keys = [chunk.keys[position] for position in positions]
            found = self._storage.get(keys, chunk.deadline)
            results = [
                got if got.value is None else codec.decode(key, got.value) for key, got in zip(keys, found, strict=True)
            ]
            bad = [key for key, got in zip(keys, results, strict=True) if got.outcome in BAD_VALUES]
            if bad:
                self._storage.delete(bad, chunk.deadline)
            return results

        return call

    def _set(self, chunk: Chunk) -> Call:
        codec = _codec_of(chunk)
        values = [
            (key, codec.encode(key, bytes(payload))) for key, payload in zip(chunk.keys, chunk.payloads, strict=True)
        ]

        def call(positions: Sequence[int]) -> list[Got]:
            return [Got(outcome) for outcome in self._store([values[each] for each in positions], chunk.deadline)]

        return call

    def _delete(self, chunk: Chunk) -> Call:
        def call(positions: Sequence[int]) -> list[Got]:
            keys = [chunk.keys[position] for position in positions]
            return [Got(outcome) for outcome in self._storage.delete(keys, chunk.deadline)]

        return call

    def _store(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        """Write what is not there. A key stands for its content, so what is there need not be written again."""
        keys = [key for key, _ in values]
        found = self._storage.exists(keys, deadline)
        outcomes = dict.fromkeys(keys, Outcome.PRESENT)
        absent = [value for value, there in zip(values, found, strict=True) if there is not Outcome.HIT]
        if absent:
            stored = self._storage.set(absent, deadline)
            outcomes |= dict(zip((key for key, _ in absent), stored, strict=True))
        return [outcomes[key] for key in keys]


def _codec_of(chunk: Chunk) -> ValueCodec:
    assert chunk.codec is not None, "a GET or a SET has a codec"
    return chunk.codec
