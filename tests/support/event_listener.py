"""A router's side of published KV events, written from the format alone: it knows none of the app's code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec
import zmq

PATIENCE_S = 60.0
END_OF_REPLAY = 2**64 - 1


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    medium: str | None = None


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


class Listener:
    """messages: what came, by sequence number."""

    def __init__(self, endpoint: str, topic: str = "", hwm: int = 0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.set_hwm(hwm)
        self._socket.connect(endpoint)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.topics: set[bytes] = set()
        self.messages: dict[int, EventBatch] = {}

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def receive_to(self, sequence: int) -> None:
        """Until the message of that number has come."""
        while max(self.messages, default=-1) < sequence:
            assert self._socket.poll(PATIENCE_S * 1e3), f"nothing after {list(self.messages)[-3:]}"
            topic, number, payload = self._socket.recv_multipart()
            self.topics.add(topic)
            self.messages[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload, type=EventBatch)

    def receive_some(self, timeout_s: float) -> bool:
        """-> whether anything came within the time."""
        if not self._socket.poll(timeout_s * 1e3):
            return False
        self.receive_to(max(self.messages, default=-1) + 1)
        return True

    def replayed(self, endpoint: str, first: int) -> dict[int, EventBatch]:
        """What the publisher still has from that number on."""
        messages: dict[int, EventBatch] = {}
        with self._context.socket(zmq.DEALER) as socket:
            socket.connect(endpoint)
            socket.send_multipart((b"", first.to_bytes(8, "big")))
            while socket.poll(PATIENCE_S * 1e3):
                _, number, payload = socket.recv_multipart()
                sequence = int.from_bytes(number, "big")
                if sequence == END_OF_REPLAY:
                    assert not payload
                    return messages
                messages[sequence] = msgspec.msgpack.decode(payload, type=EventBatch)
        raise AssertionError(f"the replay has no end: {list(messages)[-3:]}")


def held(batches: Iterable[EventBatch]) -> dict[str, set[int]]:
    """What each medium has after these, by the rules of the format."""
    pages: dict[str, set[int]] = {}
    for batch in batches:
        for event in batch.events:
            match event:
                case BlockStored():
                    pages.setdefault(_medium(event), set()).update(event.block_hashes)
                case BlockRemoved():
                    pages.setdefault(_medium(event), set()).difference_update(event.block_hashes)
                case AllBlocksCleared():
                    pages[_medium(event)] = set()
    return pages


def _medium(event: Any) -> str:
    return event.medium or "GPU"
