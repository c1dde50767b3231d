from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from app.errors import ConfigError
from app.models.bundled import find_bundled_model
from app.models.checkpoint import Checkpoint, open_checkpoint
from app.models.file_digests import FileDigests
from app.models.model_cache import default_cache_dir

CONFIG = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
NORM = np.linspace(0.5, 1.5, 8, dtype=np.float32)
HEAD = np.arange(80, dtype=np.float32).reshape(10, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    save_file({"norm": NORM, "head": HEAD.astype(ml_dtypes.bfloat16)}, made / "model.safetensors")
    return made


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def reopen(folder: Path, cache: Path) -> Checkpoint:
    return open_checkpoint(str(folder), cache_dir=cache)


def test_a_folder_gives_its_configuration_and_weights(folder: Path, cache: Path) -> None:
    checkpoint = reopen(folder, cache)

    assert checkpoint.folder == folder
    assert checkpoint.model_config.hidden_size == 8
    assert checkpoint.weight_names() == ("head", "norm")
    np.testing.assert_array_equal(checkpoint.tensor("norm"), NORM)


def test_bfloat16_widens_to_float32_unless_asked_otherwise(folder: Path, cache: Path) -> None:
    checkpoint = reopen(folder, cache)

    widened = checkpoint.tensor("head")
    stored = checkpoint.tensor("head", dtype=ml_dtypes.bfloat16)

    assert widened.dtype == np.float32
    assert stored.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(widened, HEAD)  # integers below 256 are exact in bfloat16
    np.testing.assert_array_equal(stored.astype(np.float32), HEAD)


def test_weights_of_the_asked_type_are_views_of_the_file(folder: Path, cache: Path) -> None:
    tensor = reopen(folder, cache).tensor("norm")

    assert not tensor.flags.owndata
    assert not tensor.flags.writeable


def test_weights_may_lie_in_several_files(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    save_file({"norm": NORM}, folder / "model-00001-of-00002.safetensors")
    save_file({"head": HEAD}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"norm": "model-00001-of-00002.safetensors", "head": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    checkpoint = reopen(folder, cache)

    assert checkpoint.weight_names() == ("head", "norm")
    np.testing.assert_array_equal(checkpoint.tensor("head"), HEAD)

    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"model-00002-of-00002\.safetensors is missing"):
        reopen(folder, cache)


@pytest.mark.parametrize("kept", [0, 7, 8, 40, -1])
def test_truncated_weights_are_refused_when_opened(folder: Path, cache: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])

    with pytest.raises(ConfigError, match=r"model\.safetensors.*damaged"):
        reopen(folder, cache)


def test_missing_weights_and_names_are_refused(folder: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match="no weight called other"):
        reopen(folder, cache).tensor("other")

    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        reopen(folder, cache)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_a_damaged_index_is_refused(folder: Path, cache: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)

    with pytest.raises(ConfigError, match=r"index\.json"):
        reopen(folder, cache)


@pytest.mark.parametrize("path", ["", "no/such/model", "~nobody-here/model", "\0"])
def test_a_path_that_is_no_model_is_refused(cache: Path, path: str) -> None:
    with pytest.raises(ConfigError, match="model_path"):
        open_checkpoint(path, cache_dir=cache)


def test_a_file_of_another_kind_is_refused(folder: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match="GGUF file or Hugging Face folder"):
        open_checkpoint(str(folder / "model.safetensors"), cache_dir=cache)


def test_the_digest_names_content_and_not_place(folder: Path, cache: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copy"
    shutil.copytree(folder, copied)
    first = reopen(folder, cache).digest
    assert reopen(copied, cache).digest == first
    assert len(first) == 64

    save_file({"norm": NORM + 1, "head": HEAD.astype(ml_dtypes.bfloat16)}, copied / "model.safetensors")
    assert reopen(copied, cache).digest != first


def test_a_digest_is_remembered_until_the_file_changes(tmp_path: Path, mocker) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    first = FileDigests(tmp_path / "cache").sha256(path)
    read = mocker.spy(__import__("hashlib"), "file_digest")

    assert FileDigests(tmp_path / "cache").sha256(path) == first
    assert read.call_count == 0

    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert FileDigests(tmp_path / "cache").sha256(path) != first
    assert read.call_count == 1


def test_a_damaged_note_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    digests = FileDigests(tmp_path / "cache")
    first = digests.sha256(path)
    (note,) = (tmp_path / "cache" / "digests").iterdir()

    for damage in ["", "[]", '{"file": 1}']:
        note.write_text(damage)
        assert digests.sha256(path) == first
    assert json.loads(note.read_text())["sha256"] == first


def test_a_cache_that_cannot_be_written_only_costs_time(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(b"one")
    in_the_way = tmp_path / "file"
    in_the_way.touch()

    assert len(FileDigests(in_the_way / "cache").sha256(path)) == 64


def test_the_bundled_model_may_be_absent(mocker) -> None:
    mocker.patch("importlib.util.find_spec", return_value=None)

    assert find_bundled_model() is None


def test_the_cache_lies_where_the_system_keeps_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("TPUKV_CACHE_DIR", raising=False)
    monkeypatch.setattr("sys.platform", "linux")

    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_cache_dir() == Path("/home/somebody/.cache/tpukv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/tpukv")
    monkeypatch.setenv("TPUKV_CACHE_DIR", "/own")
    assert default_cache_dir() == Path("/own")
