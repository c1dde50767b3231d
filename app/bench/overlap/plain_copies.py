"""The floor of what backups cost: a thread that copies as many bytes, and does nothing else."""

from __future__ import annotations

import queue
import threading

import numpy as np

_MOST_PAGES = 64  # of each buffer, so that what is copied is in no cache


class PlainCopies:
    """Copies within memory, page by page, in one thread, each page twice: out of a pool, and from there to the host."""

    def __init__(self, page_bytes: int) -> None:
        shape = (_MOST_PAGES, max(page_bytes, 1))
        self._pool, self._staging, self._host = (np.full(shape, value, np.uint8) for value in range(3))
        self._asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._num_bytes = self._num_pages = 0
        self._thread = threading.Thread(target=self._copy, name="plain-copies", daemon=True)
        self._thread.start()

    def begin(self, num_bytes: int) -> None:
        """Whole pages of that, at once; what is left over goes with the next."""
        self._num_bytes += num_bytes
        pages = self._num_bytes // self._pool.shape[1] - self._num_pages
        self._num_pages += pages
        self._asked.put(pages)

    def close(self) -> None:
        self._asked.put(-1)
        self._thread.join()

    def _copy(self) -> None:
        page = 0
        while (count := self._asked.get()) >= 0:
            for _ in range(count):
                np.copyto(self._staging[page], self._pool[page])
                np.copyto(self._host[page], self._staging[page])
                page = (page + 1) % _MOST_PAGES
