"""A model on disk: its configuration, its weights by name, and what identifies it.

A Hugging Face folder is used where it lies. A GGUF file is converted once into such a folder, in a cache of the user.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike

from app.config.model_config import ModelConfig
from app.errors import ConfigError
from app.models.file_digests import FileDigests
from app.models.hf_config import load_model_config
from app.models.model_cache import converted_folder, default_cache_dir
from app.models.weight_files import WeightFiles

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction done, 0 to 1."""

_GGUF_MAGIC = b"GGUF"


class Checkpoint:
    """A Hugging Face folder, opened: headers are read, weights stay memory-mapped on disk."""

    def __init__(self, folder: Path, *, identify: Callable[[WeightFiles], str]) -> None:
        """`identify` computes the digest when it is first asked for. Raises ConfigError for what is missing."""
        self._folder = folder
        self._model_config = load_model_config(folder)
        self._weights = WeightFiles(folder)
        self._identify = identify
        self._digest: str | None = None

    @property
    def folder(self) -> Path:
        """Where config.json, the tokenizer's files and the weights lie."""
        return self._folder

    @property
    def model_config(self) -> ModelConfig:
        return self._model_config

    @property
    def digest(self) -> str:
        """64 hex digits that are equal only for equal content of weights and configuration.

        The first call of the first process reads every byte of a folder's weights; after that it is remembered.
        """
        if self._digest is None:
            self._digest = self._identify(self._weights)
        return self._digest

    def weight_names(self) -> tuple[str, ...]:
        """The names of all tensors, sorted."""
        return self._weights.names

    def tensor(self, name: str, *, dtype: DTypeLike = np.float32) -> np.ndarray:
        """The tensor called `name`, in the shape it is stored in, as `dtype`.

        A read-only view of the mapped file where the stored type is `dtype` already, else a new array. Raises
        ConfigError when there is no such tensor.
        """
        return self._weights.tensor(name).astype(dtype, copy=False)


def open_checkpoint(model_path: str, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder.

    `cache_dir`: where converted GGUF files and digests are kept; by default a folder of the user. The first opening of
    a GGUF file converts it (seconds to minutes, float32 on disk); later ones cost milliseconds. Raises ConfigError
    when the path is neither, or when something in it is missing, damaged or not supported.
    """
    path = Path(os.path.expanduser(model_path))
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    digests = FileDigests(cache)
    report = progress or _silent
    if model_path and os.path.isdir(path):
        return Checkpoint(path, identify=lambda weights: _folder_digest(path, weights, digests))
    if os.path.isfile(path) and _is_gguf(path):
        file_digest = digests.sha256(path)
        return Checkpoint(converted_folder(path, file_digest, cache, report), identify=lambda _: file_digest)
    raise ConfigError(field="model_path", value=model_path, allowed="an existing GGUF file or Hugging Face folder")


def _is_gguf(path: Path) -> bool:
    # By content, not by suffix: a download cache may have renamed the file.
    try:
        with path.open("rb") as file:
            return file.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError as error:
        raise ConfigError(field="model_path", value=str(path), allowed=f"cannot be read: {error.strerror}") from error


def _folder_digest(folder: Path, weights: WeightFiles, digests: FileDigests) -> str:
    whole = hashlib.sha256()
    for path in [folder / "config.json", *weights.paths]:
        whole.update(f"{path.name}\0{digests.sha256(path)}\0".encode())
    return whole.hexdigest()


def _silent(_stage: str, _fraction: float) -> None:
    """Progress that nobody watches."""
