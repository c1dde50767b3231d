"""How the layers of a program over a flat pool follow one another, and how their weights lie for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
from jax.sharding import Mesh

from app.models.decoder import LayerWeights
from app.models.weight_plan import TensorPlan

# (weights, index, hidden, pool) -> (hidden, pool)
RunLayer = Callable[[LayerWeights[jax.Array], jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


class Parts(Protocol):
    """Something for each weight: the array, its shape, or its partition."""

    def one(self, plan: TensorPlan, layer: int | None) -> Any:
        """For one weight, of that layer or of none."""
        ...

    def stack(self, plan: TensorPlan, num_layers: int) -> Any:
        """For that weight of so many layers in one array, layers first."""
        ...


class LayerRun(Protocol):
    def parts(self, plans: LayerWeights[TensorPlan], num_layers: int, parts: Parts) -> Any:
        """The layers' weights, as this way of running them wants them."""
        ...

    def run(
        self, layers: Any, num_layers: int, run_layer: RunLayer, hidden: jax.Array, pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """For use inside a program."""
        ...

    def layers_in_text(self, num_layers: int) -> int:
        """How often the program's text has a layer."""
        ...


class LoopOverLayers:
    """One loop over stacked weights: a layer is compiled once, whatever the depth."""

    def parts(self, plans: LayerWeights[TensorPlan], num_layers: int, parts: Parts) -> LayerWeights[Any]:
        stacked: LayerWeights[Any] = jax.tree.map(lambda plan: parts.stack(plan, num_layers), plans)
        return stacked

    def run(
        self, layers: LayerWeights[jax.Array], num_layers: int, run_layer: RunLayer, hidden: jax.Array, pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        def run_index(index: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            own = jax.tree.map(lambda stack: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False), layers)
            return run_layer(own, index, *carried)

        # A scan over the pool's layers would copy the pool twice; carried, it is written where it lies.
        return jax.lax.fori_loop(0, num_layers, run_index, (hidden, pool))

    def layers_in_text(self, num_layers: int) -> int:
        return 1


class LayersInARow:
    """Layers one after another, weights in arrays of their own: compiling takes longer with every layer."""

    def parts(self, plans: LayerWeights[TensorPlan], num_layers: int, parts: Parts) -> tuple[LayerWeights[Any], ...]:
        return tuple(jax.tree.map(partial(parts.one, layer=layer), plans) for layer in range(num_layers))

    def run(
        self,
        layers: tuple[LayerWeights[jax.Array], ...],
        num_layers: int,
        run_layer: RunLayer,
        hidden: jax.Array,
        pool: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        traced_once = jax.jit(run_layer)
        for index, own in enumerate(layers):
            hidden, pool = traced_once(own, jax.numpy.int32(index), hidden, pool)
        return hidden, pool

    def layers_in_text(self, num_layers: int) -> int:
        return num_layers


# Before a loop, the compiler for these converts the weights of all layers to other tiles, in every step.
_CONVERTS_STACKS = ("TPU7x",)


def layer_run_for(mesh: Mesh) -> LayerRun:
    """The better one for the mesh's kind of device."""
    if mesh.devices.flat[0].device_kind in _CONVERTS_STACKS:
        return LayersInARow()
    return LoopOverLayers()
