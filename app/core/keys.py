"""The one key by which cached pages are found, in every tier and in every event.

Two requests may share pages only if their namespaces are equal field by field and their tokens are equal up to there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import NamedTuple

import blake3
import numpy as np

TOKEN_BYTES = 4


class Namespace(NamedTuple):
    """What keeps equal tokens apart. Each field has its own place, so no two spellings of it can collide.

    None means "not given" and differs from the empty string and from any other value.
    """

    adapter: str | None = None
    salt: str | None = None
    extra_key: str | None = None
    dp_rank: int = 0

    def seed(self) -> bytes:
        """32 bytes that start this namespace's page hash chain. Injective: every field is length-prefixed and typed."""
        hasher = blake3.blake3(b"tpukv.namespace.v1")
        for field in (self.adapter, self.salt, self.extra_key):
            encoded = b"\x00" if field is None else b"\x01" + field.encode("utf-8", "surrogatepass")
            hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        hasher.update(self.dp_rank.to_bytes(8, "little", signed=True))
        return hasher.digest()


DEFAULT_NAMESPACE = Namespace()


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageIdentity:
    """What must be equal for bytes of KV to mean the same to two processes, or to one before and after a restart.

    Pages of another pool (of sliding-window layers, say) have a `layout` of their own, so that they get keys of their
    own.
    """

    model: str  # digest of the model's configuration
    weights: str  # digest of its weights
    dtype: str
    layout: str  # the pool, and the order of axes within one page
    page_size: int  # tokens
    tp_size: int
    first_kv_head: int  # this process holds heads first_kv_head .. end_kv_head - 1
    end_kv_head: int

    def digest(self) -> bytes:
        """32 bytes, equal only for equal fields: each is typed by its place and length-prefixed."""
        hasher = blake3.blake3(b"tpukv.storage_identity.v1")
        for field in astuple(self):
            encoded = str(field).encode("utf-8", "surrogatepass")
            hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        return hasher.digest()

    def seed(self, namespace: Namespace) -> bytes:
        """32 bytes that start the chain of page hashes by which `namespace`'s pages are found outside this process.

        Injective in both: each has a digest of fixed length. Seeded with it, `page_hashes` gives the keys of storage.
        """
        return blake3.blake3(b"tpukv.stored_pages.v1" + self.digest() + namespace.seed()).digest()

    def part_keys(self, hashes: Iterable[bytes]) -> list[bytes]:
        """Storage keys of what a pool of this identity keeps beside full pages: of those with these `page_hashes`.

        Full pages have their hashes for keys, so that trees, events and storage name them alike. What lies beside one
        (its window page, the snapshot after it) has a keyed hash of that: equal only for equal hashes and identities,
        and never the hash of a page.
        """
        digest = self.digest()
        return [blake3.blake3(each, key=digest).digest() for each in hashes]


class RadixKey:
    """Tokens within a namespace, held as the bytes of one int32 buffer so that comparing an edge is one memcmp.

    `raw` is 4 bytes a token, in native order. Build it once per request and pass it on; cutting is `head`.
    `uncut` begins with `raw`: a head shares the bytes of its key, and copies them only for whom asks for `raw`.
    `priority` is the request's, lower is more urgent: it changes no match, only how long what it used is kept.
    """

    __slots__ = ("namespace", "num_tokens", "priority", "uncut")

    def __init__(self, raw: bytes, namespace: Namespace = DEFAULT_NAMESPACE, priority: int = 0) -> None:
        self.uncut = raw
        self.priority = priority
        self.num_tokens = len(raw) // TOKEN_BYTES
        self.namespace = namespace

    @classmethod
    def of(cls, token_ids: np.ndarray, namespace: Namespace = DEFAULT_NAMESPACE, priority: int = 0) -> RadixKey:
        """`token_ids`: (num_tokens,) int32. Copies once: O(num_tokens)."""
        if token_ids.dtype != np.int32:
            raise TypeError(f"token_ids must be int32, not {token_ids.dtype}")
        return cls(token_ids.tobytes(), namespace, priority)

    @property
    def raw(self) -> bytes:
        """The bytes of these tokens and no others. O(num_tokens) for a head."""
        num_bytes = self.num_tokens * TOKEN_BYTES
        if len(self.uncut) != num_bytes:
            self.uncut = self.uncut[:num_bytes]
        return self.uncut

    def tokens(self) -> np.ndarray:
        """(num_tokens,) int32, read-only view."""
        return np.frombuffer(self.uncut, np.int32, self.num_tokens)

    def head(self, num_tokens: int) -> RadixKey:
        """The key of the first `num_tokens` tokens, or of all. O(1)."""
        head = RadixKey(self.uncut, self.namespace, self.priority)
        head.num_tokens = min(num_tokens, self.num_tokens)
        return head

    def __len__(self) -> int:
        return self.num_tokens

    def __repr__(self) -> str:
        return f"RadixKey({self.num_tokens} tokens, {self.namespace})"


def page_hashes(parent: bytes, raw: bytes, page_size: int) -> list[bytes]:
    """The hash chain of `raw`'s whole pages, one 32-byte blake3 a page.

    `parent` is the hash of the page before, or at the root a seed: the namespace's, or where pages leave this process
    `StorageIdentity.seed`. So a hash names a page's tokens and everything before it, within its namespace, and with
    that seed also the model and the form of the bytes. O(len(raw)).
    """
    step = page_size * TOKEN_BYTES
    hashes = []
    for begin in range(0, len(raw) - step + 1, step):
        parent = blake3.blake3(parent + raw[begin : begin + step]).digest()
        hashes.append(parent)
    return hashes
