"""Page ids of a request by page index, growing at the end."""

from __future__ import annotations

import numpy as np

_SPARE = 16


class PageList:
    """(n,) int32. Appending costs O(pages appended), on average."""

    __slots__ = ("_pages", "size")

    def __init__(self, pages: np.ndarray) -> None:
        self.size = pages.size
        self._pages = np.concatenate([pages, np.zeros(_SPARE, np.int32)])

    def append(self, pages: np.ndarray) -> None:
        end = self.size + pages.size
        if end > self._pages.size:
            grown = np.zeros(max(end, 2 * self._pages.size), np.int32)
            grown[: self.size] = self._pages[: self.size]
            self._pages = grown
        self._pages[self.size : end] = pages
        self.size = end

    def view(self) -> np.ndarray:
        """(size,) int32; what is written to it is written here. Valid until the next `append`."""
        return self._pages[: self.size]
