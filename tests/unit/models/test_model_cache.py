from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.errors import ConfigError
from app.models.checkpoint import open_checkpoint
from app.text.tokenizer import load_tokenizer
from tests.support.tiny_gguf import TOKENS, WIDTH, converted, model_folders, write_gguf

PROJECT = Path(__file__).parents[3]


def test_a_second_opening_reads_nothing_of_the_file(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = converted(model, cache)

    def must_not_run(*_: Any) -> None:
        raise AssertionError("the file was read again")

    monkeypatch.setattr("app.models.gguf_convert.GgufModel", must_not_run)
    monkeypatch.setattr("hashlib.file_digest", must_not_run)
    assert converted(model, cache).folder == first.folder


def test_a_changed_file_is_converted_anew(model: Path, weights: dict[str, np.ndarray], cache: Path) -> None:
    first = converted(model, cache)
    weights["model.norm.weight"] += 1
    write_gguf(model, weights)
    os.utime(model, ns=(1, 1))

    second = converted(model, cache)

    assert second.digest != first.digest
    np.testing.assert_array_equal(second.tensor("model.norm.weight"), weights["model.norm.weight"])


@pytest.mark.parametrize("damage", ["cut weights", "no tokenizer", "no manifest", "empty manifest", "old format"])
def test_a_damaged_conversion_is_made_anew(model: Path, cache: Path, damage: str) -> None:
    folder = converted(model, cache).folder
    manifest = folder / "conversion.json"
    {
        "cut weights": lambda: os.truncate(folder / "model.safetensors", 100),
        "no tokenizer": (folder / "tokenizer.json").unlink,
        "no manifest": manifest.unlink,
        "empty manifest": lambda: manifest.write_text(""),
        "old format": lambda: manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 0')),
    }[damage]()

    checkpoint = converted(model, cache)

    assert load_tokenizer(checkpoint.folder).vocab_size == len(TOKENS)
    assert checkpoint.tensor("model.norm.weight").shape == (WIDTH,)


def test_progress_is_told_and_reaches_its_end(model: Path, cache: Path) -> None:
    told: list[tuple[str, float]] = []

    open_checkpoint(str(model), cache_dir=cache, progress=lambda stage, fraction: told.append((stage, fraction)))

    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert all(stage for stage, _ in told)


def test_a_cache_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()

    with pytest.raises(ConfigError, match=r"cannot be converted into .*file/models.*TPUKV_CACHE_DIR"):
        converted(model, in_the_way)


def test_a_full_disk_is_told_before_anything_is_written(model: Path, cache: Path, mocker) -> None:
    mocker.patch("shutil.disk_usage").return_value.free = 1000

    with pytest.raises(ConfigError, match="0 MB are free"):
        converted(model, cache)
    assert model_folders(cache) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(model: Path, cache: Path, mocker) -> None:
    mocker.patch("app.models.gguf_convert.save_file", side_effect=OSError(28, "No space left on device"))

    with pytest.raises(ConfigError, match="No space left"):
        converted(model, cache)
    assert model_folders(cache) == []


OPEN = """
import os, signal, sys
from pathlib import Path
from app.models.checkpoint import open_checkpoint

def progress(stage, fraction):
    print(stage, flush=True)
    if stage == "converting weights" and fraction > 0.5 and sys.argv[3] == "die":
        os.kill(os.getpid(), signal.SIGKILL)

checkpoint = open_checkpoint(sys.argv[1], cache_dir=Path(sys.argv[2]), progress=progress)
print("norm", checkpoint.tensor("model.norm.weight").sum())
"""


def start(model: Path, cache: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OPEN, str(model), str(cache), how]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)


def test_two_processes_at_once_convert_it_once(model: Path, cache: Path) -> None:
    processes = [start(model, cache, "live") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]

    assert [process.returncode for process in processes] == [0, 0]
    assert sum("converting weights" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1
    assert model_folders(cache) == [hashlib.sha256(model.read_bytes()).hexdigest()]


def test_a_killed_conversion_leaves_nothing_that_is_taken_for_complete(
    model: Path, weights: dict[str, np.ndarray], cache: Path, tmp_path: Path
) -> None:
    digest = hashlib.sha256(model.read_bytes()).hexdigest()
    process = start(model, cache, "die")
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert model_folders(cache) == [f"{digest}.partial"]

    # Another model's conversion clears it away; a new try of the same one succeeds.
    weights["model.norm.weight"] += 1
    other = converted(write_gguf(tmp_path / "other.gguf", weights), cache)
    assert model_folders(cache) == [other.digest]
    assert converted(model, cache).digest == digest
    assert model_folders(cache) == sorted([digest, other.digest])
