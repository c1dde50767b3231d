"""KV events as they travel: what a step's events are in bytes, in the format that vLLM and SGLang publish.

A message has three parts: the topic, a sequence number (8 bytes, big-endian), and in msgpack

    [seconds since 1970, [event, ...], data-parallel rank]
    event = ["BlockStored", hashes, parent hash or nil, token ids, page size, nil, medium, adapter or nil]
          | ["BlockRemoved", hashes, medium]
          | ["AllBlocksCleared"]  of the device, ["AllBlocksCleared", medium] of a lower tier

Hashes are the last 8 bytes of page hashes, as unsigned integers.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from app.observability.kv_events import Medium, NamespaceFields

MEDIUMS: dict[Medium, str] = {"device": "GPU", "host": "CPU_PINNED", "storage": "EXTERNAL"}


class Stored(msgspec.Struct, array_like=True, gc=False, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None


class Removed(msgspec.Struct, array_like=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str


class Cleared(msgspec.Struct, array_like=True, gc=False, omit_defaults=True, tag="AllBlocksCleared"):
    medium: str | None = None


Event: TypeAlias = Stored | Removed | Cleared


class Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Event]
    data_parallel_rank: int


class Happened(Protocol):
    """What a tier told, cheap to note down; `event` makes of it what is sent."""

    def event(self) -> Event: ...


class _Stored(msgspec.Struct, frozen=True, gc=False):
    medium: str
    page_size: int
    adapter: str | None
    parent_hash: bytes | None
    page_hashes: Sequence[bytes]
    raw: bytes

    def event(self) -> Event:
        return Stored(
            block_hashes=_short(self.page_hashes),
            parent_block_hash=None if self.parent_hash is None else _short((self.parent_hash,))[0],
            token_ids=array("i", self.raw).tolist(),
            block_size=self.page_size,
            lora_id=None,
            medium=self.medium,
            lora_name=self.adapter,
        )


class _Removed(msgspec.Struct, frozen=True, gc=False):
    medium: str
    page_hashes: Sequence[bytes]

    def event(self) -> Event:
        return Removed(block_hashes=_short(self.page_hashes), medium=self.medium)


class _Cleared(msgspec.Struct, frozen=True, gc=False):
    medium: Medium

    def event(self) -> Event:
        return Cleared() if self.medium == "device" else Cleared(medium=MEDIUMS[self.medium])


EVERYTHING_CLEARED: tuple[Happened, ...] = tuple(_Cleared(medium) for medium in reversed(MEDIUMS))


class KvEventOutbox:
    """What all tiers of one cache told since it was last drained, in the order in which it happened."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._happened: list[Happened] = []

    def sink(self, medium: Medium) -> MediumSink:
        """EventSink of caches/base.py for one tier."""
        return MediumSink(medium, self._page_size, lambda each: self._happened.append(each))

    def drain(self) -> list[Happened]:
        drained = self._happened
        if drained:
            self._happened = []
        return drained


class MediumSink:
    """Notes down what one tier tells. No token is looked at here: this is called in the middle of a step."""

    def __init__(self, medium: Medium, page_size: int, add: Callable[[Happened], None]) -> None:
        self._medium: Medium = medium
        self._page_size = page_size
        self._add = add

    def stored(
        self, *, namespace: NamespaceFields, parent_hash: bytes | None, page_hashes: list[bytes], raw: bytes
    ) -> None:
        """`raw`: the pages' tokens, int32 in native order."""
        hashes = tuple(page_hashes)  # the list goes on changing
        self._add(_Stored(MEDIUMS[self._medium], self._page_size, namespace[0], parent_hash, hashes, raw))

    def removed(self, *, page_hashes: list[bytes]) -> None:
        self._add(_Removed(MEDIUMS[self._medium], tuple(page_hashes)))

    def cleared(self) -> None:
        self._add(_Cleared(self._medium))


def encoded(ts: float, happened: Iterable[Happened], dp_rank: int = 0) -> bytes:
    """The third part of a message."""
    return _ENCODER.encode(Batch(ts, [each.event() for each in happened], dp_rank))


def _short(page_hashes: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(each[-8:], "big") for each in page_hashes]


_ENCODER = msgspec.msgpack.Encoder()
