"""What left the tree lately, so that a miss can be told from something that was never there."""

from __future__ import annotations

from app.core.keys import Namespace

Place = tuple[int | Namespace, bytes]  # (serial of the node it followed, its first page)


class EvictionMemory:
    """When the page that followed a node was evicted; of at least the last 2048 evicted nodes and at most 4096.

    A node that is gone takes what is remembered of its children with it: its serial is never used again. So an answer
    may be missing, but none is wrong. What came back meanwhile is still here: look into the tree first.
    """

    __slots__ = ("_newer", "_older")

    HALF = 2048

    def __init__(self) -> None:
        # Two dictionaries, the older of which is dropped whole: one insertion an eviction, whatever is in them.
        self._newer: dict[Place, float] = {}
        self._older: dict[Place, float] = {}

    def remember(self, serial: int | Namespace, first_page: bytes, now: float) -> None:
        """The node that began with `first_page`, below the node `serial`, is being evicted. O(1)."""
        newer = self._newer
        newer[serial, first_page] = now
        if len(newer) >= self.HALF:
            self._older, self._newer = newer, {}

    def when(self, serial: int | Namespace, first_page: bytes) -> float | None:
        """The last time that this page was evicted there; None if it was not, or too long ago. O(1)."""
        place = (serial, first_page)
        newest = self._newer.get(place)
        return self._older.get(place) if newest is None else newest

    def clear(self) -> None:
        self._newer = {}
        self._older = {}

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)
