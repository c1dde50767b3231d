"""What left the tree lately, so that a miss can be told from something that was never there, and a return from a first
visit."""

from __future__ import annotations

from app.core.keys import Namespace

Place = tuple[int | Namespace, bytes]  # (serial of the node it followed, its first page)


class EvictionMemory:
    """When the page that followed a node was evicted, and how often it had been used.

    Of at least the last 2048 evicted nodes and at most 4096. A node that is gone takes what is remembered of its
    children with it: its serial is never used again. So an answer may be missing, but none is wrong. What came back
    meanwhile is still here: look into the tree first.
    """

    __slots__ = ("_newer", "_older")

    HALF = 2048

    def __init__(self) -> None:
        # Two dictionaries, the older of which is dropped whole: one insertion an eviction, whatever is in them.
        self._newer: dict[Place, tuple[float, int]] = {}
        self._older: dict[Place, tuple[float, int]] = {}

    def remember(self, serial: int | Namespace, first_page: bytes, now: float, uses: int) -> None:
        """The node that began with `first_page`, below the node `serial`, is being evicted. O(1)."""
        newer = self._newer
        newer[serial, first_page] = now, uses
        if len(newer) >= self.HALF:
            self._older, self._newer = newer, {}

    def when(self, serial: int | Namespace, first_page: bytes) -> float | None:
        """The last time that this page was evicted there; None if it was not, or too long ago. O(1)."""
        found = self._find(serial, first_page)
        return None if found is None else found[0]

    def uses(self, serial: int | Namespace, first_page: bytes) -> int:
        """How often this page is used there, if it comes back now: its uses before the eviction, and this one. O(1).

        0 if it was not evicted, or too long ago.
        """
        found = self._find(serial, first_page)
        return 0 if found is None else found[1] + 1

    def clear(self) -> None:
        self._newer = {}
        self._older = {}

    def _find(self, serial: int | Namespace, first_page: bytes) -> tuple[float, int] | None:
        place = (serial, first_page)
        return self._newer.get(place) or self._older.get(place)

    def __len__(self) -> int:
        return len(self._newer) + len(self._older)
