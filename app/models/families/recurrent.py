"""Families with recurrent layers, read as far as memory is concerned, so that a cache can be selected for them."""

from __future__ import annotations

from app.config.model_config import Component, ModelConfig
from app.models.families.fields import Fields, model_config


def unserved(fields: Fields) -> ModelConfig:
    return model_config(fields, components=frozenset({Component.FULL, Component.RECURRENT}))
