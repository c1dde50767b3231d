"""Page keys, values and damages for tests of storages."""

from __future__ import annotations

import hashlib
import time

from app.core.keys import StorageIdentity
from app.hicache.storage.base import Deadline, PageKey
from app.hicache.storage.value import ValueCodec

PAYLOAD_BYTES = 1000
IDENTITY = StorageIdentity(
    model="m" * 64,
    weights="w" * 64,
    dtype="float32",
    layout="full",
    page_size=16,
    tp_size=1,
    first_kv_head=0,
    end_kv_head=3,
)


def key(number: int) -> PageKey:
    return PageKey(hashlib.sha256(f"page {number}".encode()).digest())


def payload(number: int, num_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Bytes that belong to no other number."""
    return hashlib.shake_128(f"payload {number}".encode()).digest(num_bytes)


def codec() -> ValueCodec:
    return ValueCodec(IDENTITY, PAYLOAD_BYTES)


def value(number: int) -> bytes:
    return b"".join(codec().encode(key(number), payload(number)))


def soon() -> Deadline:
    """A deadline that only a call that hangs would meet."""
    return time.monotonic() + 60


def past() -> Deadline:
    return time.monotonic() - 1
