"""What every test may use. Nothing here imports jax."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import structlog

if TYPE_CHECKING:
    from tests.support.engine import Engine

# Mixing float32 with float64, or int32 with a default integer, by accident is an error in tests. Read when jax loads.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")

# How long an example takes says how busy the machine is, not whether the product is right.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command that a test runs sets up logging to the test's own stderr, which is closed when the test is over."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Opens engines over the fake model: `engine(page_size=16, ...)` with any field of ServerArgs.

    When the test has passed, each is drained and every invariant of every owner is checked.
    """
    from tests.support.engine import opened

    with ExitStack() as stack:

        def open_engine(**fields: Any) -> Engine:
            return stack.enter_context(opened(**fields))

        yield open_engine
