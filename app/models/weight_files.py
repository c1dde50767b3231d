"""The safetensors files of a folder, memory-mapped.

The library validates a file's header (a truncated file is refused when it is opened) but copies every tensor it hands
out, at a fraction of the disk cache's speed; so the bytes are mapped here and only looked at in place.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from app.errors import ConfigError
from app.text.json_files import read_json_object

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """Where one tensor lies: bytes begin..end of a mapped file."""

    file: np.ndarray  # (file size,) uint8, mapped
    begin: int
    end: int
    dtype: str
    shape: tuple[int, ...]


class WeightFiles:
    """All tensors of a folder by name. Opening reads headers only."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError naming the file that is missing or damaged."""
        self._folder = folder
        self._paths = _weight_paths(folder)
        self._entries: dict[str, _Entry] = {}
        for path in self._paths:
            self._entries.update(_read_entries(path))

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, sorted."""
        return self._paths

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view in the stored type and shape. Raises ConfigError when the name or its type is unknown."""
        if name not in self._entries:
            raise ConfigError(field="model_path", value=str(self._folder), allowed=f"has no weight called {name}")
        entry = self._entries[name]
        if entry.dtype not in _DTYPES:
            raise ConfigError(
                field=name, value=entry.dtype, allowed=f"types that can be read are {', '.join(sorted(_DTYPES))}"
            )
        return entry.file[entry.begin : entry.end].view(_DTYPES[entry.dtype]).reshape(entry.shape)


def _weight_paths(folder: Path) -> tuple[Path, ...]:
    index = folder / INDEX_FILE
    if not index.is_file():
        return (folder / SINGLE_FILE,)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ConfigError(field="model_path", value=str(index), allowed="must have a weight_map of file names")
    return tuple(folder / name for name in sorted(set(weight_map.values())))


def _read_entries(path: Path) -> dict[str, _Entry]:
    try:
        safe_open(path, framework="numpy")  # for its validation: sizes, overlaps, offsets past the end
        file = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except FileNotFoundError as error:
        raise ConfigError(
            field="model_path", value=str(path.parent), allowed=f"has no weights: {path.name} is missing"
        ) from error
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            field="model_path", value=str(path), allowed=f"is damaged or cannot be read: {error}"
        ) from error
    (header_bytes,) = struct.unpack("<Q", file[:8].tobytes())
    data = 8 + header_bytes
    header: dict[str, Any] = json.loads(file[8:data].tobytes())
    header.pop("__metadata__", None)
    return {
        name: _Entry(
            file=file,
            begin=data + entry["data_offsets"][0],
            end=data + entry["data_offsets"][1],
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
        )
        for name, entry in header.items()
    }
