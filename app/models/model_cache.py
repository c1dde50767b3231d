"""Converted GGUF files on disk: converted once, used by every later process.

<cache>/models/<sha256>.lock       held by the one process that converts; the system drops it when that one dies
<cache>/models/<sha256>.partial/   being written; only the holder of the lock touches it
<cache>/models/<sha256>/           complete: it got this name in one rename, after its last file was written
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from safetensors import SafetensorError

from app.errors import ConfigError

_MANIFEST = "conversion.json"
_FORMAT = 1  # grows when a conversion gives other files than before


def default_cache_dir() -> Path:
    """$TPUKV_CACHE_DIR, else tpukv/ in the user's cache folder of this system. Raises ConfigError without a home."""
    own = os.environ.get("TPUKV_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if xdg.is_absolute():  # the XDG specification says to ignore relative ones
        return xdg / "tpukv"
    try:
        home = Path.home()
    except RuntimeError as error:
        raise ConfigError(field="TPUKV_CACHE_DIR", value=None, allowed="a folder; there is no home folder") from error
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "tpukv"


def converted_folder(gguf: Path, sha256: str, cache_dir: Path, report: Callable[[str, float], None]) -> Path:
    """The Hugging Face folder made from the file `gguf`, whose digest is `sha256`; converts it when there is none.

    Processes that ask at the same time wait for the one that converts. Killing it at any point leaves nothing that a
    later process would take for complete. Raises ConfigError for a file that cannot be converted and for a cache that
    cannot be written.
    """
    folder = cache_dir / "models" / sha256
    if _is_complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(_lock_path(folder)):
            if not _is_complete(folder):  # another process may have made it while this one waited
                _remove_stale(folder.parent)
                _convert(gguf, folder, report)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            field="model_path",
            value=str(gguf),
            allowed=f"cannot be converted into {folder}: {error}; TPUKV_CACHE_DIR names another place",
        ) from error
    return folder


def _convert(gguf: Path, folder: Path, report: Callable[[str, float], None]) -> None:
    from app.models.gguf_convert import GgufModel  # importing gguf costs 0.2 s, which a converted model never needs

    report("reading the model file", 0.0)
    model = GgufModel(gguf)
    _require_space(folder.parent, model.float32_bytes)
    partial = _partial_path(folder)
    _make_empty(partial)
    try:
        model.write(partial, report)
        _write_manifest(partial)
        shutil.rmtree(folder, ignore_errors=True)  # an incomplete or older one
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _require_space(folder: Path, need: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(f"{need / 1e6:.0f} MB are needed there and {free / 1e6:.0f} MB are free")


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def _write_manifest(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    (folder / _MANIFEST).write_text(json.dumps({"format": _FORMAT, "files": sizes}, indent=2) + "\n")


def _is_complete(folder: Path) -> bool:
    """Whether every file is there in its full size, so that a power cut or a cleaner's work is noticed too."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text())
        sizes = manifest["files"].items()
        return manifest["format"] == _FORMAT and all((folder / name).stat().st_size == size for name, size in sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _remove_stale(models: Path) -> None:
    """Remove what killed conversions left behind: folders being written whose lock nobody holds."""
    for partial in models.glob("*.partial"):
        with contextlib.suppress(OSError), _locked(partial.with_suffix(".lock"), fcntl.LOCK_EX | fcntl.LOCK_NB):
            shutil.rmtree(partial, ignore_errors=True)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _partial_path(folder: Path) -> Path:
    return folder.with_name(folder.name + ".partial")


@contextlib.contextmanager
def _locked(path: Path, operation: int = fcntl.LOCK_EX) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, operation)
        yield  # closing the file unlocks it
