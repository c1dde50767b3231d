"""What is kept in float32 when all other weights are bfloat16."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from app.models.families.table import decoder_of
from app.models.weights_on_mesh import WeightShapes
from app.tpu.mesh import make_mesh
from tests.support.golden_models import golden_model

DECAYS = {"qwen3_next": {"A_log", "dt_bias"}, "falcon_h1": {"A_log", "dt_bias", "D"}, "llama": set()}


@pytest.mark.parametrize("name", DECAYS)
def test_what_decays_are_made_of_stays_as_it_is_in_the_checkpoint(name: str) -> None:
    model = golden_model(name)
    decoder, source = decoder_of(model.config), model.source()
    shapes = WeightShapes(model.config, decoder, make_mesh(1, "cpu"), np.dtype(jnp.bfloat16))

    exact = set()
    for plan, layer in decoder.plans():
        abstract: Any = shapes.abstract(plan)
        stacked: Any = shapes.abstract_stack(plan, 2)
        placed = shapes.place(source, plan, layer)
        assert placed.dtype == abstract.dtype == stacked.dtype
        if placed.dtype == jnp.float32:
            exact.add(plan.name.rsplit(".", 1)[1])
            stated = plan.take(source.tensor(plan.name.format(layer=layer)))
            np.testing.assert_array_equal(np.asarray(placed), stated)
            assert (stated != stated.astype(jnp.bfloat16)).any()  # or the test would show nothing
        else:
            assert placed.dtype == jnp.bfloat16
    assert exact == DECAYS[name]
