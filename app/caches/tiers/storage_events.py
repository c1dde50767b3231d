"""What a listener is told of the storage: the full pages that it is known to have.

Control sees no more of a storage than answers: what it wrote, and what it asked for. So a listener's set is what was
seen last, and pages that somebody else wrote or evicted are not in it, or still in it, until they are asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from app.caches.base import EventSink
from app.core.keys import TOKEN_BYTES, RadixKey

MAX_TOLD = 1 << 16  # pages; of more than that the listener is told to forget those seen longest ago


class StorageEvents:
    """Tells `sink`, if there is one, in such a way that its listeners hold exactly what is remembered here."""

    def __init__(self, sink: EventSink | None, page_size: int, max_told: int = MAX_TOLD) -> None:
        self._sink = sink
        self._page_size = page_size
        self._max_told = max_told
        self._told: OrderedDict[bytes, None] = OrderedDict()

    @property
    def has_listener(self) -> bool:
        return self._sink is not None

    def answered(
        self, key: RadixKey, first: int, hashes: Sequence[bytes], there: Sequence[bool | None], parent: bytes | None
    ) -> None:
        """Pages first, first + 1, ... of the key have `hashes`; whether storage has each, None where it was not asked.

        parent: the hash of the page before them.
        """
        if self._sink is None:
            return
        self._removed([each for each, is_there in zip(hashes, there, strict=True) if is_there is False])
        is_new = np.array(
            [bool(flag) and each not in self._told for each, flag in zip(hashes, there, strict=True)], np.int8
        )
        for each, is_there in zip(hashes, there, strict=True):
            if is_there:
                self._told[each] = None
                self._told.move_to_end(each)
        bounds = np.flatnonzero(np.diff(is_new, prepend=0, append=0)).tolist()
        step = self._page_size * TOKEN_BYTES
        for begin, end in zip(bounds[::2], bounds[1::2], strict=True):
            self._sink.stored(
                namespace=key.namespace,
                parent_hash=hashes[begin - 1] if begin else parent,
                page_hashes=list(hashes[begin:end]),
                raw=key.raw[(first + begin) * step : (first + end) * step],
            )
        self._removed(list(islice(self._told, max(0, len(self._told) - self._max_told))))

    def cleared(self) -> None:
        """Nothing is known of the storage any more."""
        if self._sink is not None and self._told:
            self._told.clear()
            self._sink.cleared()

    def _removed(self, hashes: list[bytes]) -> None:
        assert self._sink is not None
        known = [each for each in hashes if each in self._told]
        for each in known:
            del self._told[each]
        if known:
            self._sink.removed(page_hashes=known)
