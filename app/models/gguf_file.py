"""Reading a GGUF file: its metadata and its tensors, dequantised to float32.

The `gguf` package dequantises. Its own reader is not used: it takes 3.4 s for a header that is parsed here in 0.1 s,
and a damaged length can keep it busy without end. Here every length is checked against the size of the file.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from app.errors import ConfigError
from app.models.gguf_metadata import GgufMetadata

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4

_STRING = 8
_ARRAY = 9
_SCALARS = {  # value type in the file -> (struct code, numpy type)
    0: ("B", "<u1"),
    1: ("b", "<i1"),
    2: ("H", "<u2"),
    3: ("h", "<i2"),
    4: ("I", "<u4"),
    5: ("i", "<i4"),
    6: ("f", "<f4"),
    7: ("?", "?"),
    10: ("Q", "<u8"),
    11: ("q", "<i8"),
    12: ("d", "<f8"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """shape: outermost first, as numpy has it. begin, num_bytes: where its data lie in the file."""

    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    begin: int
    num_bytes: int


class GgufFile:
    """A GGUF file, mapped: the header is parsed, tensors are read when asked for."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError naming the file when it is no GGUF file, truncated or damaged."""
        self._path = path
        try:
            self._bytes = np.memmap(path, dtype=np.uint8, mode="r")
            values, self.tensors = _parse(_Cursor(self._bytes.data))
        except OSError as error:
            raise self._refusal(f"cannot be read: {error.strerror}") from error
        except (struct.error, ValueError, OverflowError) as error:  # UnicodeDecodeError is a ValueError
            raise self._refusal(f"is no GGUF file, truncated or damaged: {error}") from error
        self.metadata = GgufMetadata(values)

    def tensor(self, name: str) -> np.ndarray:
        """The tensor as float32 in `tensors[name].shape`; perhaps a read-only view of the file.

        Raises ConfigError when its quantization cannot be undone.
        """
        info = self.tensors[name]
        data = self._bytes[info.begin : info.begin + info.num_bytes]
        rows = data.reshape(*info.shape[:-1], -1)
        try:
            return dequantize(rows, info.quantization)
        except NotImplementedError as error:
            raise self._refusal(f"{name} is stored as {info.quantization.name}, which cannot be read") from error

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(field="model_path", value=str(self._path), allowed=reason)


class _Cursor:
    """A position in the file. Reading past the end raises struct.error or ValueError."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.position = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.view, self.position)
        self.position += struct.calcsize("<" + code)
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        end = self.position + length
        if end > len(self.view):
            raise ValueError(f"a text of {length} bytes does not fit")
        data = bytes(self.view[self.position : end])
        self.position = end
        return data.decode("utf-8")

    def value(self) -> Any:
        return self._typed(self.scalar("I"))

    def _typed(self, value_type: int) -> Any:
        if value_type == _STRING:
            return self.text()
        if value_type == _ARRAY:
            return self._array()
        if value_type not in _SCALARS:
            raise ValueError(f"unknown value type {value_type}")
        return self.scalar(_SCALARS[value_type][0])

    def _array(self) -> list[Any]:
        item_type, length = self.scalar("I"), self.scalar("Q")
        if item_type == _STRING:
            return [self.text() for _ in range(length)]
        if item_type not in _SCALARS:
            raise ValueError(f"unknown array item type {item_type}")
        numbers = np.frombuffer(self.view, dtype=_SCALARS[item_type][1], count=length, offset=self.position)
        self.position += numbers.nbytes
        return numbers.tolist()


def _parse(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    magic = bytes(cursor.view[: len(_MAGIC)])
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}")
    cursor.position = len(_MAGIC)
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        raise ValueError(f"version {version}; known are {_VERSIONS}, little-endian")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.text(): cursor.value() for _ in range(num_values)}
    described = [_tensor_header(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"alignment {alignment}")
    data_begin = -(-cursor.position // alignment) * alignment
    return metadata, {
        name: _located(shape, quantization, data_begin + offset, len(cursor.view))
        for name, shape, quantization, offset in described
    }


def _tensor_header(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.text()
    num_dimensions = cursor.scalar("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"{name} has {num_dimensions} dimensions")
    innermost_first = [cursor.scalar("Q") for _ in range(num_dimensions)]
    quantization = GGMLQuantizationType(cursor.scalar("I"))
    return name, tuple(reversed(innermost_first)), quantization, cursor.scalar("Q")


def _located(shape: tuple[int, ...], quantization: GGMLQuantizationType, begin: int, file_size: int) -> TensorInfo:
    block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
    if 0 in shape or shape[-1] % block_elements:
        raise ValueError(f"shape {shape} does not go with {quantization.name}")
    num_elements = 1
    for size in shape:  # Python's own integers: a damaged size must not wrap around
        num_elements *= size
    num_bytes = num_elements // block_elements * block_bytes
    if begin + num_bytes > file_size:
        raise ValueError(f"a tensor ends at byte {begin + num_bytes} of {file_size}")
    return TensorInfo(shape=shape, quantization=quantization, begin=begin, num_bytes=num_bytes)
