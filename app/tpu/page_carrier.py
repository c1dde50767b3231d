"""How the pages of one pool leave the device and come back. See core/transfers.py for when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from app.core.transfers import OfEachPool

PageArrays = tuple[jax.Array, ...]
"""The content of one page, all layers: a few arrays that nobody writes to, on the device or in pinned host memory."""

PoolContents = OfEachPool[Sequence[PageArrays]]
"""Contents of pages of each kind, in the order of PageIds; empty for kinds that a model lacks."""


class PageForm(Protocol):
    """Host pages of one kind, and their bytes. From any thread."""

    def to_bytes(self, content: PageArrays) -> np.ndarray:
        """A host page as storage keeps it: (page_bytes,) uint8, contiguous, read-only. Waits for nothing but memory."""
        ...

    def from_bytes(self, payload: np.ndarray) -> PageArrays:
        """A host page from what `to_bytes` gave: (page_bytes,) uint8, which is copied. ConfigError for another size."""
        ...


class PageCarrier(PageForm, Protocol):
    """For one kind of pages: full, window, or snapshots of states. `buffers` are always the whole device pool's."""

    @property
    def page_bytes(self) -> int:
        """Of one page, over all ranks, padding that the pool stores included. What every rank holds counts once."""
        ...

    @property
    def page(self) -> PageArrays:
        """A host page as shapes, types and shardings."""
        ...

    def gather(self, buffers: Any, pages: np.ndarray) -> list[PageArrays]:
        """Dispatch copies of pages, (n,) int32, into device arrays of their own. In order of dispatch. Donates nothing.

        Any n: it is done in few sizes, of which few programs are compiled. Raises ForeignPageError for an id that is
        no page's: 0, which is never written, among them.
        """
        ...

    def scatter(self, buffers: Any, pages: np.ndarray, contents: Sequence[PageArrays]) -> Any:
        """Dispatch writing device arrays into pages, (n,) int32. Donates this kind's arrays. -> the whole pool's.

        Raises as `gather`, before anything is donated.
        """
        ...

    @property
    def num_programs(self) -> int:
        """Programs that were dispatched so far, each counted once: it grows when one is compiled, or read back."""
        ...

    def groups(self) -> list[np.ndarray]:
        """Pages, (n,) int32, of which each gather and each scatter is another program: all that there are of either."""
        ...

    def to_host(self, contents: Sequence[PageArrays]) -> list[PageArrays]:
        """Begin copying device arrays into pinned host memory. Returns at once."""
        ...

    def to_device(self, contents: Sequence[PageArrays]) -> list[PageArrays]:
        """Begin copying host arrays to the device. Returns at once."""
        ...
