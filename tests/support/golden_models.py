"""Tiny models of every family with the logits that an independent implementation computes: tests/data/golden/models."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.config.model_config import ModelConfig
from app.models.families.table import FAMILIES
from app.models.hf_config import model_config_from_hf
from tests.support.seeded_weights import seeded_weight

FOLDER = Path(__file__).parents[1] / "data" / "golden" / "models"


class SeededSource:
    """A WeightsSource that remembers what it was asked for."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        self.shapes = shapes
        self.asked: set[str] = set()

    def tensor(self, name: str) -> np.ndarray:
        self.asked.add(name)
        return seeded_weight(name, self.shapes[name])


class GoldenModel(NamedTuple):
    config: ModelConfig
    hf_config: dict[str, Any]
    shapes: dict[str, list[int]]  # of every tensor of the checkpoint
    sequences: tuple[np.ndarray, ...]  # token ids, (n,) int32 each
    logits: tuple[np.ndarray, ...]  # after each token, (n, vocab_size) float32 each

    def source(self) -> SeededSource:
        return SeededSource(self.shapes)


@cache
def golden_model(name: str) -> GoldenModel:
    stated = json.loads((FOLDER / f"{name}.json").read_text())
    with np.load(FOLDER / f"{name}.npz") as file:
        ends = np.cumsum(file["lengths"])[:-1]
        sequences, logits = np.split(file["token_ids"], ends), np.split(file["logits"], ends)
    config = model_config_from_hf(stated["config"])
    return GoldenModel(config, stated["config"], stated["weights"], tuple(sequences), tuple(logits))


def served_goldens() -> list[str]:
    """The names of the models whose family has a decoder."""
    families = {path.stem: json.loads(path.read_text())["config"]["model_type"] for path in FOLDER.glob("*.json")}
    return sorted(name for name, family in families.items() if family in FAMILIES and FAMILIES[family].decoder)
