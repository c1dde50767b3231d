"""`tpukv cache`: a look into the folder of a file storage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from app import cli
from app.hicache.storage.base import Outcome
from app.hicache.storage.file import FileStorage
from app.hicache.storage.file_layout import value_path
from app.hicache.storage.value import HEADER_BYTES, ValueCodec
from tests.support.storage import IDENTITY, PAYLOAD_BYTES, codec, key, payload, soon, value

ROOT = Path(__file__).parents[3]
OTHER = replace(IDENTITY, weights="other")
OURS, THEIRS = IDENTITY.digest().hex(), OTHER.digest().hex()
VALUE_BYTES = HEADER_BYTES + PAYLOAD_BYTES


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FileStorage]:
    """Three values of ours, then one of another model."""
    opened = FileStorage(tmp_path, 10**6)
    opened.set([(key(number), (value(number),)) for number in range(3)], soon())
    opened.set([(key(9), ValueCodec(OTHER, 50).encode(key(9), bytes(50)))], soon())
    yield opened
    opened.check_integrity()
    opened.close()


def run(*argv: str) -> int:
    return cli.main(["cache", *argv])


def test_ls_lists_the_last_used_first(storage: FileStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    storage.get([key(1)], soon())

    assert run("ls", "--path", str(tmp_path), "--json") == 0

    rows = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in rows] == [key(number).hex() for number in (1, 9, 2, 0)]
    assert [row["identity"] for row in rows] == [OURS, THEIRS, OURS, OURS]
    assert [row["num_bytes"] for row in rows] == [VALUE_BYTES, HEADER_BYTES + 50, VALUE_BYTES, VALUE_BYTES]
    assert {row["state"] for row in rows} == {"good"}


def test_ls_as_a_table_of_one_identity(
    storage: FileStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("ls", "--path", str(tmp_path), "--identity", THEIRS[:6].upper()) == 0

    header, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["key", "identity", "bytes", "last", "used", "state"]
    assert row.split()[:3] == [key(9).hex()[:16], THEIRS[:16], str(HEADER_BYTES + 50)]


def test_du_adds_up_by_identity(storage: FileStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("du", "--path", str(tmp_path), "--json") == 0
    rows = {row["identity"]: (row["num_values"], row["num_bytes"]) for row in json.loads(capsys.readouterr().out)}
    assert rows == {OURS: (3, 3 * VALUE_BYTES), THEIRS: (1, HEADER_BYTES + 50)}
    assert storage.usage() == (4, sum(size for _, size in rows.values()))[::-1]

    assert run("du", "--path", str(tmp_path)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split() == ["all", "4", f"{3 * VALUE_BYTES + HEADER_BYTES + 50:,}"]


def test_verify_of_good_values(storage: FileStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "--path", str(tmp_path)) == 0
    assert capsys.readouterr().out == "4 values, 0 of them bad\n"


def test_verify_names_every_bad_value(storage: FileStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [value_path(tmp_path, key(number)) for number in range(3)]
    flipped = bytearray(paths[0].read_bytes())
    flipped[-1] ^= 1
    paths[0].write_bytes(flipped)
    os.truncate(paths[1], 500)
    storage.set([(key(1), (value(1)[:500],))], soon())
    other = b"".join(codec().encode(key(5), payload(5)))
    storage.set([(key(2), (other,))], soon())

    assert run("verify", "--path", str(tmp_path)) == 1
    assert sorted(capsys.readouterr().out.splitlines()) == sorted(
        [f"{paths[0]}: damaged", f"{paths[1]}: short", f"{paths[2]}: misplaced", "4 values, 3 of them bad"]
    )
    assert run("verify", "--path", str(tmp_path), "--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["num_values"], {row["state"] for row in told["bad"]}) == (4, {"damaged", "short", "misplaced"})
    assert run("verify", "--path", str(tmp_path), "--identity", THEIRS) == 0


def test_clear_in_step_with_a_storage_that_is_open(
    storage: FileStorage, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("clear", "--path", str(tmp_path), "--identity", OURS) == 0
    assert capsys.readouterr().out == f"removed 3 values, {3 * VALUE_BYTES:,} bytes\n"
    assert storage.usage() == (HEADER_BYTES + 50, 1)

    assert run("clear", "--path", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"num_values": 1, "num_bytes": HEADER_BYTES + 50}
    assert storage.usage() == (0, 0)
    assert [got.outcome for got in storage.get([key(1)], soon())] == [Outcome.ABSENT]
    assert storage.set([(key(1), (value(1),))], soon()) == [Outcome.STORED]


@pytest.mark.parametrize("verb", ["ls", "du", "verify", "clear"])
def test_a_folder_that_is_no_storage_is_refused_and_left_alone(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_bytes(b"")

    assert run(verb, "--path", str(tmp_path)) == 2

    assert capsys.readouterr().err == (
        f"tpukv: error: --path={str(tmp_path)!r} is not allowed: a folder that the file backend has used\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_nothing_of_a_model_is_imported(storage: FileStorage, tmp_path: Path) -> None:
    code = (
        "import sys; from app.cli import main; code = main();"
        "print(code, sorted({'jax', 'tokenizers', 'dependency_injector'} & set(sys.modules)), file=sys.stderr)"
    )
    argv = [sys.executable, "-c", code, "cache", "verify", "--path", str(tmp_path)]

    finished = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)

    assert (finished.stdout, finished.stderr) == ("4 values, 0 of them bad\n", "0 []\n")
