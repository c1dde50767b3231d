"""The pages that the tests of kernels run over."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax.numpy as jnp
import pytest

SHAPES = [(8, 128), (16, 384), (32, 1024)]  # page_size, width
DTYPES = [jnp.float32, jnp.bfloat16, jnp.uint16]
EVERY_DAY = list(zip(SHAPES, DTYPES, strict=True))


def slow(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.slow)


def page_cases() -> list[Any]:
    """(page_size, width, dtype): each shape with each type. All but one of a kind are slow: the interpreter takes
    seconds for each.
    """
    return [
        pytest.param(*shape, dtype, marks=() if (shape, dtype) in EVERY_DAY else pytest.mark.slow)
        for shape, dtype in product(SHAPES, DTYPES)
    ]
