"""How the pages of every kind of pool leave the device and come back.

    pool --gather--> arrays of their own --to_host--> pinned host memory --to_bytes--> storage
         <--scatter--                    <--to_device--                  <--from_bytes--

Pages are gathered and scattered in groups of few sizes, a program each. A group is small because programs over few
pages are several times faster on CPU than over many (docs/decisions/0014-host-pages.md), and because it bounds what the
copies need beside the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from app.core.ports import PoolSpec
from app.core.transfers import OfEachPool, PageIds
from app.errors import ConfigError, ForeignPageError
from app.tpu.hybrid_layout import HybridSpec
from app.tpu.page_arrays import PageLayout, StackedPages
from app.tpu.page_carrier import PageArrays, PageCarrier, PoolContents
from app.tpu.pool_layout import PoolLayout
from app.tpu.program import Program, from_host

GROUP_SIZES = (8, 1)  # pages a program; each size costs seconds of compiling for a deep model
PINNED_HOST = "pinned_host"


class Part(NamedTuple):
    """Where the arrays of one kind are among the pool's."""

    of: Callable[[Any], Any]
    replaced: Callable[[Any, Any], Any]


_WHOLE = Part(lambda buffers: buffers, lambda _, arrays: arrays)
_FULL = Part(lambda buffers: buffers.full, lambda buffers, arrays: buffers._replace(full=arrays))
_WINDOW = Part(lambda buffers: buffers.window, lambda buffers, arrays: buffers._replace(window=arrays))
_STATES = Part(lambda buffers: buffers.states, lambda buffers, arrays: buffers._replace(states=arrays))


class ArraysCarrier:
    """The PageCarrier of one kind of pages, whatever their layout. Holds no pages itself."""

    def __init__(self, part: Part, layout: PageLayout, last_page: int) -> None:
        """last_page: pages 1..last_page are carried."""
        self._part = part
        self._layout = layout
        self._last_page = last_page
        self._on_device = tuple(array.sharding for array in layout.page)
        self._dispatched: set[tuple[str, int]] = set()  # programs, by what they do and to how many pages
        self._on_host = tuple(sharding.with_memory_kind(PINNED_HOST) for sharding in self._on_device)

    @property
    def page(self) -> PageArrays:
        return _placed(self._layout.page, self._on_host)

    @property
    def device_page(self) -> PageArrays:
        """The same page on the device."""
        return self._layout.page

    @property
    def page_bytes(self) -> int:
        return sum(_num_bytes(array) for array in self._layout.page)

    def gather(self, buffers: Any, pages: np.ndarray) -> list[PageArrays]:
        self._check(pages)
        arrays = self._part.of(buffers)
        contents: list[PageArrays] = []
        for group in _groups(pages.size):
            self._dispatched.add(("gather", pages[group].size))
            contents += _read(arrays, pages[group].copy(), layout=self._layout)  # dispatched: it may be read later
        return contents

    def scatter(self, buffers: Any, pages: np.ndarray, contents: Sequence[PageArrays]) -> Any:
        self._check(pages)
        arrays = self._part.of(buffers)
        for group in _groups(pages.size):
            self._dispatched.add(("scatter", pages[group].size))
            arrays = _write(arrays, pages[group].copy(), list(contents[group]), layout=self._layout)
        return self._part.replaced(buffers, arrays)

    @property
    def num_programs(self) -> int:
        return len(self._dispatched)

    def groups(self) -> list[np.ndarray]:
        return [np.arange(1, 1 + size, dtype=np.int32) for size in GROUP_SIZES if size <= self._last_page]

    def to_host(self, contents: Sequence[PageArrays]) -> list[PageArrays]:
        return jax.device_put(list(contents), [self._on_host] * len(contents))

    def to_device(self, contents: Sequence[PageArrays]) -> list[PageArrays]:
        return jax.device_put(list(contents), [self._on_device] * len(contents))

    def to_bytes(self, content: PageArrays) -> np.ndarray:
        """The arrays one after another, each in C order over all ranks; without a copy of a single one on one rank."""
        parts = [_assembled(array).reshape(-1).view(np.uint8) for array in content]
        payload = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.uint8), *parts])
        payload.setflags(write=False)
        return payload

    def from_bytes(self, payload: np.ndarray) -> PageArrays:
        if payload.dtype != np.uint8 or payload.shape != (self.page_bytes,):
            value = f"{payload.dtype}{list(payload.shape)}"
            raise ConfigError(field="payload", value=value, allowed=f"uint8[{self.page_bytes}], one page")
        own = payload.copy()  # jax may go on reading it
        ends = np.cumsum([_num_bytes(array) for array in self._layout.page])
        parts = np.split(own, ends[:-1]) if ends.size else []
        arrays = [
            part.view(array.dtype).reshape(array.shape) for part, array in zip(parts, self._layout.page, strict=True)
        ]
        return jax.device_put(tuple(arrays), self._on_host)

    def programs(self, buffers: Any, kind: str = "") -> list[Program]:
        """Those of a full group. buffers: the pool's arrays as shapes; kind: told in the programs' names.

        None where a page is nothing.
        """
        if not self._layout.page:
            return []
        size, statics = GROUP_SIZES[0], {"layout": self._layout}
        arrays, ids, contents = self._part.of(buffers), from_host((size,), np.int32), [self._layout.page] * size
        backup = Program(name="backup" + kind, function=_read, arguments=(arrays, ids), statics=statics)
        restore = Program(
            name="restore" + kind,
            function=_write,
            arguments=(arrays, ids, contents),
            statics=statics,
            donated=(arrays,),
        )
        return [backup, restore]

    def _check(self, pages: np.ndarray) -> None:
        if pages.size and not (pages.min() >= 1 and pages.max() <= self._last_page):
            foreign = pages[(pages < 1) | (pages > self._last_page)]
            raise ForeignPageError(pages=tuple(foreign.tolist()), capacity=self._last_page)


def page_carriers(spec: PoolSpec, mesh: Mesh, layout: PoolLayout) -> OfEachPool[ArraysCarrier | None]:
    """Of the pool of a model whose every layer has full attention."""
    return OfEachPool(ArraysCarrier(_WHOLE, layout.page_layout(spec, mesh), spec.num_pages), None, None)


def hybrid_page_carriers(spec: HybridSpec, mesh: Mesh, num_pages: int) -> OfEachPool[ArraysCarrier | None]:
    """Of a HybridKVPool. num_pages: full pages, also where no layer has any: then a page is of 0 bytes."""
    buffers = spec.abstract(mesh)
    window, states = spec.window, spec.states

    def carrier(part: Part, last_page: int) -> ArraysCarrier:
        return ArraysCarrier(part, StackedPages.of(part.of(buffers)), last_page)

    return OfEachPool(
        carrier(_FULL, num_pages),
        None if window is None else carrier(_WINDOW, window.num_pages),
        None if states is None else carrier(_STATES, states.num_snapshots),
    )


def page_programs(spec: PoolSpec, mesh: Mesh, layout: PoolLayout) -> list[Program]:
    """`backup` and `restore` of one group of pages."""
    return ArraysCarrier(_WHOLE, layout.page_layout(spec, mesh), spec.num_pages).programs(layout.abstract(spec, mesh))


def hybrid_page_programs(spec: HybridSpec, mesh: Mesh) -> list[Program]:
    """The programs of every kind, by name: `backup_full` and so on."""
    carriers = hybrid_page_carriers(spec, mesh, num_pages=0)
    return [
        program
        for kind, carrier in zip(("_full", "_window", "_states"), carriers, strict=True)
        if carrier is not None
        for program in carrier.programs(spec.abstract(mesh), kind)
    ]


def gather_each(carriers: OfEachPool[PageCarrier | None], buffers: Any, ids: PageIds) -> PoolContents:
    """`gather` of each kind. A model without a kind has no ids of it."""
    return OfEachPool(
        *(
            [] if carrier is None else carrier.gather(buffers, pages)
            for carrier, pages in zip(carriers, ids, strict=True)
        )
    )


def scatter_each(carriers: OfEachPool[PageCarrier | None], buffers: Any, ids: PageIds, contents: PoolContents) -> Any:
    """`scatter` of each kind. Donates the arrays of those that there are contents of."""
    for carrier, pages, arrived in zip(carriers, ids, contents, strict=True):
        if carrier is not None and pages.size:
            buffers = carrier.scatter(buffers, pages, arrived)
    return buffers


@partial(jax.jit, static_argnames="layout")
def _read(arrays: Any, ids: jax.Array, *, layout: PageLayout) -> list[PageArrays]:
    return jax.lax.with_sharding_constraint(
        layout.read(arrays, ids), [tuple(array.sharding for array in layout.page)] * ids.size
    )


@partial(jax.jit, donate_argnums=0, static_argnames="layout")
def _write(arrays: Any, ids: jax.Array, contents: list[PageArrays], *, layout: PageLayout) -> Any:
    return layout.write(arrays, ids, contents)


def _groups(num_pages: int) -> Iterator[slice]:
    first = 0
    for size in GROUP_SIZES:
        while num_pages - first >= size:
            yield slice(first, first + size)
            first += size


def _placed(arrays: PageArrays, shardings: Sequence[Any]) -> Any:
    return tuple(
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
        for array, sharding in zip(arrays, shardings, strict=True)
    )


def _assembled(array: jax.Array) -> np.ndarray:
    """All of it. Not by jax, which would keep what it puts together of several ranks as long as the array lives."""
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    whole = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards:
        whole[shard.index] = np.asarray(shard.data)
    return whole


def _num_bytes(array: Any) -> int:
    return int(np.prod(array.shape)) * array.dtype.itemsize
