"""config.json of a Hugging Face folder -> ModelConfig.

A switch that would change the computation and that we do not have is refused here, before anything is built. What the
families are, and what each of them reads: app/models/families/table.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.config.model_config import ModelConfig
from app.errors import ConfigError
from app.models.families.fields import Fields
from app.models.families.table import FAMILIES
from app.text.json_files import read_json_object


def load_model_config(folder: Path) -> ModelConfig:
    """The ModelConfig of a model folder. Raises ConfigError naming the file or the field."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            field="model_path", value=str(folder), allowed="a GGUF file or a Hugging Face folder with a config.json"
        )
    return model_config_from_hf(read_json_object(path))


def model_config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Read the fields of a parsed config.json.

    Raises ConfigError for a family that is not known (the known ones are listed), a field that is missing or out of
    range, and a switch that we do not compute.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(field="model_type", value=model_type, allowed=f"known are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type].read(Fields(config))
