"""What one page is made of, and how it is read from and written to the pool's arrays. For use inside programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from app.tpu.page_carrier import PageArrays


class PageLayout(Protocol):
    """Hashable: programs are compiled for each."""

    @property
    def page(self) -> PageArrays:
        """One page on the device, as shapes, types and shardings."""
        ...

    def read(self, arrays: Any, ids: jax.Array) -> list[PageArrays]:
        """ids: (n,) int32, pages of the pool -> each page's content, a copy."""
        ...

    def write(self, arrays: Any, ids: jax.Array, contents: Sequence[PageArrays]) -> Any:
        """The inverse, in place where `arrays` are donated."""
        ...


@dataclass(frozen=True, slots=True)
class StackedPages:
    """Of arrays with an axis of pages in front, one or more a layer: those alike become one array of the page.

    A page is a tuple of (layers, ...): of keys and values of L layers, say, one array (2 * L, page_size, width); of
    slots of states one for each shape that a layer's arrays have.

    kinds: what is alike, as a shape of one of the pool's arrays, and at which places among its leaves it stands.
    """

    kinds: tuple[tuple[Any, tuple[int, ...]], ...]

    @classmethod
    def of(cls, arrays: Any) -> StackedPages:
        """arrays: the pool's, as shapes."""
        places: dict[Any, list[int]] = {}
        for place, array in enumerate(jax.tree.leaves(arrays)):
            places.setdefault(array, []).append(place)
        return cls(tuple((array, tuple(those)) for array, those in places.items()))

    @property
    def page(self) -> PageArrays:
        return tuple(_abstract((len(places), *array.shape[1:]), array) for array, places in self.kinds)

    def read(self, arrays: Any, ids: jax.Array) -> list[PageArrays]:
        # Each piece straight to its place: on CPU twice as fast as all pages of an array at once, and those then apart.
        leaves = jax.tree.leaves(arrays)
        return [
            tuple(jnp.concatenate([_page_of(leaves[place], ids[n]) for place in places]) for _, places in self.kinds)
            for n in range(ids.size)
        ]

    def write(self, arrays: Any, ids: jax.Array, contents: Sequence[PageArrays]) -> Any:
        leaves, structure = jax.tree.flatten(arrays)
        for (_, places), pages in zip(self.kinds, zip(*contents, strict=True), strict=True):
            those = _put([leaves[place] for place in places], ids, pages)
            for place, array in zip(places, those, strict=True):
                leaves[place] = array
        return jax.tree.unflatten(structure, leaves)


@dataclass(frozen=True, slots=True)
class FlatPages:
    """Of a flat pool, whose one array holds the pages of one layer after another's.

    arrays: FlatKVBuffers. A page is one array, (num_layers, page_size, ...).

    array: the pool's, as a shape.
    """

    array: Any
    num_layers: int

    @property
    def page(self) -> PageArrays:
        return (_abstract((self.num_layers, *self.array.shape[1:]), self.array),)

    def read(self, arrays: Any, ids: jax.Array) -> list[PageArrays]:
        layers = self._by_layer(arrays)
        return [(jax.lax.dynamic_index_in_dim(layers, ids[n], axis=1, keepdims=False),) for n in range(ids.size)]

    def write(self, arrays: Any, ids: jax.Array, contents: Sequence[PageArrays]) -> Any:
        layers = self._by_layer(arrays)
        for n, (content,) in enumerate(contents):
            layers = _written(layers, 1, ids[n], content[:, None])
        return arrays._replace(pages=layers.reshape(self.array.shape))

    def _by_layer(self, arrays: Any) -> jax.Array:
        return arrays.pages.reshape(self.num_layers, -1, *self.array.shape[1:])


def _put(arrays: list[jax.Array], ids: jax.Array, pages: Sequence[jax.Array]) -> list[jax.Array]:
    """arrays: one a layer; pages: (layers, ...) each -> the arrays with every layer of pages[n] at ids[n].

    A loop is compiled once however many pages there are: on CPU, a tenth of the seconds that a deep model would take.
    """
    stacked = jnp.stack(pages)

    def put_page(n: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
        return [_written(array, 0, ids[n], _one(stacked, n, layer)) for layer, array in enumerate(arrays)]

    return jax.lax.fori_loop(0, ids.size, put_page, arrays)


def _abstract(shape: tuple[int, ...], array: Any) -> Any:
    """As one of the pool's arrays is: ranks cut a page where they cut the pool, which is never along its first axis."""
    return jax.ShapeDtypeStruct(shape, array.dtype, sharding=array.sharding)


def _page_of(array: jax.Array, page: jax.Array) -> jax.Array:
    """(pages, ...) -> (1, ...)."""
    return jax.lax.dynamic_slice_in_dim(array, page, 1)


def _one(pages: jax.Array, n: jax.Array, layer: int) -> jax.Array:
    """One layer of one page: (num_pages, layers, ...) -> (1, ...)."""
    return jax.lax.dynamic_slice(pages, (n, layer, *(0,) * (pages.ndim - 2)), (1, 1, *pages.shape[2:]))[0]


def _written(array: jax.Array, axis: int, index: jax.Array, values: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, values, index, axis)
