"""These tests compile for TPUs and run nothing. They need the extra `tpu`, in an environment of its own."""

from __future__ import annotations

import importlib.util
import os

import pytest

# The compiler is used by name; without this, jax would look for a TPU to run on first.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU compiler is not installed here: `make test-tpu` makes an environment that has it")
