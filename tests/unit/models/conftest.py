"""The tiny GGUF file that the tests of conversion and of its cache read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.tiny_gguf import hf_weights, write_gguf


@pytest.fixture
def weights() -> dict[str, np.ndarray]:
    return hf_weights()


@pytest.fixture
def model(tmp_path: Path, weights: dict[str, np.ndarray]) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", weights)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"
