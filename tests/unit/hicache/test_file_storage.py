"""The file storage: its quota, its neighbours in the folder, and what the file system does to it."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pytest_mock import MockerFixture

from app.errors import ConfigError, IntegrityError
from app.hicache.storage.base import HiCacheStorage, Outcome
from app.hicache.storage.disk import Disk
from app.hicache.storage.file import FileStorage
from app.hicache.storage.file_layout import LEDGER, TEMPS, entries, value_path
from tests.support.faulty_disk import Crashed, FaultyDisk
from tests.support.storage import key, payload, soon

ROOT = Path(__file__).parents[3]
SIZE = 100
QUOTA = 10 * SIZE

Opening = Callable[..., FileStorage]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages"


@pytest.fixture
def opened(folder: Path) -> Iterator[Opening]:
    """Opens storages over `folder`, each checked and closed after the test."""
    open_ones: list[FileStorage] = []

    def opening(quota: int = QUOTA, disk: Disk | None = None) -> FileStorage:
        open_ones.append(FileStorage(folder, quota, disk))
        return open_ones[-1]

    yield opening
    for storage in open_ones:
        storage.check_integrity()
    for storage in open_ones:
        storage.close()


def put(storage: HiCacheStorage, *numbers: int, size: int = SIZE) -> list[Outcome]:
    return storage.set([(key(number), (payload(number, size),)) for number in numbers], soon())


def there(storage: HiCacheStorage, *numbers: int) -> list[int]:
    """Those of the numbers whose value is got, and is the right one."""
    found = storage.get([key(number) for number in numbers], soon())
    for number, got in zip(numbers, found, strict=True):
        assert got.value is None or got.value == payload(number, len(got.value))
    return [number for number, got in zip(numbers, found, strict=True) if got.outcome is Outcome.HIT]


def real(folder: Path) -> tuple[int, int]:
    sizes = [entry.num_bytes for entry in entries(folder)]
    return sum(sizes), len(sizes)


def temps(folder: Path) -> list[str]:
    """Values that are half written."""
    return [path.name for path in (folder / TEMPS).iterdir() if path.suffix != ".lock"]


# -- quota -----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, *range(10))
    assert there(storage, 0, 2) == [0, 2]

    put(storage, 10, 11, 12)

    assert there(storage, *range(13)) == [0, 2, 5, 6, 7, 8, 9, 10, 11, 12]
    assert storage.usage() == real(folder) == (QUOTA, 10)


def test_the_order_of_use_outlives_the_process(opened: Opening) -> None:
    first = opened()
    put(first, *range(10))
    there(first, 0)
    first.close()

    second = opened()
    put(second, 10, 11)

    assert there(second, *range(12)) == [0, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_overwriting_counts_the_new_size_only(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, *range(9))

    put(storage, 3, size=2 * SIZE)

    assert storage.usage() == real(folder) == (QUOTA, 9)
    assert there(storage, *range(9)) == list(range(9))


def test_overwriting_the_oldest_value_with_a_larger_one_evicts_the_next(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, *range(10))

    assert put(storage, 0, size=2 * SIZE) == [Outcome.STORED]

    assert storage.usage() == real(folder) == (QUOTA, 9)
    assert there(storage, *range(10)) == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_value_that_fills_the_quota_evicts_all_others_but_is_stored(opened: Opening) -> None:
    storage = opened()
    put(storage, 1, 2)

    assert put(storage, 3, size=QUOTA) == [Outcome.STORED]
    assert put(storage, 3, size=QUOTA) == [Outcome.STORED]

    assert there(storage, 1, 2, 3) == [3]


def test_a_value_over_the_quota_is_refused_and_evicts_nothing(opened: Opening) -> None:
    storage = opened()
    put(storage, 1, 2)

    assert put(storage, 3, size=QUOTA + 1) == [Outcome.TOO_LARGE]

    assert there(storage, 1, 2, 3) == [1, 2]


def test_a_smaller_quota_holds_from_the_start(opened: Opening, folder: Path) -> None:
    first = opened()
    put(first, *range(10))
    first.close()

    second = opened(quota=4 * SIZE)

    assert second.usage() == real(folder) == (4 * SIZE, 4)
    assert there(second, *range(10)) == [6, 7, 8, 9]


# -- neighbours ------------------------------------------------------------------------------------------------------


def test_files_that_are_not_ours_are_neither_counted_nor_touched(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, 1)
    name = value_path(folder, key(1)).name
    foreign = [
        folder / "README",
        folder / "zz" / "note.kv",
        folder / ("00" if name[:2] != "00" else "01") / name,  # a good name in the folder of another
        value_path(folder, key(1)).with_suffix(".KV"),
        folder / name[:2] / name.upper(),
        folder / TEMPS / "somebody.else",
    ]
    for path in foreign:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * 5000)
    outside = folder.parent / "outside"
    outside.write_bytes(b"x" * 5000)
    link = value_path(folder, key(2))
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(outside)
    storage.close()

    again = opened()
    put(again, *range(3, 20))

    assert again.usage() == real(folder) == (QUOTA, 10)
    again.clear(soon())
    assert again.usage() == (0, 0)
    assert all(path.stat().st_size == 5000 for path in [*foreign, outside])
    assert link.is_symlink()


def test_a_value_that_another_process_wrote_is_found_and_counted_once(opened: Opening, folder: Path) -> None:
    one, other = opened(), opened()
    put(one, 1, 2)
    put(other, 3)

    assert there(other, 1, 2, 3) == there(one, 1, 2, 3) == [1, 2, 3]

    assert one.usage() == other.usage() == real(folder) == (3 * SIZE, 3)


def test_processes_share_one_quota(opened: Opening, folder: Path) -> None:
    storages = [opened(), opened()]

    for number in range(60):
        put(storages[number % 2], number)
        there(storages[(number + 1) % 2], *range(number))
        assert storages[0].usage() == real(folder)
        assert real(folder)[0] <= QUOTA

    assert len(there(storages[0], *range(60))) == 10


def test_one_process_makes_room_from_what_only_the_other_wrote(opened: Opening) -> None:
    one, other = opened(), opened()
    put(one, *range(10))

    assert put(other, 10) == [Outcome.STORED]

    assert there(other, *range(11)) == list(range(1, 11))


WRITER = """
import sys, time
from app.hicache.storage.file import FileStorage
from tests.support.storage import key, soon, value
from pathlib import Path

storage = FileStorage(Path(sys.argv[1]), int(sys.argv[2]))
number = int(sys.argv[3])
print("ready", flush=True)
while True:
    storage.set([(key(number), (value(number),))], soon())
    number += 1
"""


def writer(folder: Path, quota: int, first: int) -> subprocess.Popen[str]:
    """A process that writes values from `first` on until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), str(quota), str(first)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def values_of(folder: Path) -> list[bool]:
    """For every value in `folder`, whether it is whole."""
    from app.hicache.storage.inspection import verified_values

    return [each.outcome is Outcome.HIT for each in verified_values(folder)]


def test_killing_writers_at_any_time_leaves_whole_values_and_a_right_ledger(opened: Opening, folder: Path) -> None:
    quota = 40_000
    for attempt in range(4):
        with writer(folder, quota, 1000 * attempt) as process:
            wait_for(lambda: len(values_of(folder)) > 3 + 5 * attempt)  # noqa: B023
            process.send_signal(signal.SIGKILL)

    storage = opened(quota)

    assert storage.usage() == real(folder)
    assert real(folder)[0] <= quota
    whole = values_of(folder)
    assert len(whole) > 10
    assert all(whole)
    assert temps(folder) == []
    assert put(storage, 1) == [Outcome.STORED]


def test_a_process_that_writes_does_not_disturb_one_that_reads(opened: Opening, folder: Path) -> None:
    quota = 20_000
    storage = opened(quota)
    with writer(folder, quota, 0) as process:
        wait_for(lambda: len(values_of(folder)) > 8)
        for _ in range(20):
            found = [entry.key for entry in entries(folder)]
            assert {got.outcome for got in storage.get(found, soon())} <= {Outcome.HIT, Outcome.ABSENT}
            put(storage, 999_999)
        process.send_signal(signal.SIGKILL)

    storage.close()
    again = opened(quota)
    assert again.usage() == real(folder)
    assert real(folder)[0] <= quota


def wait_for(condition: Callable[[], bool], limit_s: float = 60) -> None:
    give_up = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_live_process_keeps_its_temporary_files(opened: Opening, folder: Path) -> None:
    disk = FaultyDisk()
    one = opened(disk=disk)
    going_on, seen = threading.Event(), threading.Event()
    disk.before_rename = lambda: (seen.set(), going_on.wait())  # type: ignore[func-returns-value]
    thread = threading.Thread(target=put, args=(one, 1))
    thread.start()
    seen.wait()

    # The ledger is locked by the write that hangs, so this one could not even start to write.
    from app.hicache.storage.file_temps import TempNames

    TempNames(folder / TEMPS).close()

    assert len(temps(folder)) == 1
    going_on.set()
    thread.join()
    assert there(one, 1) == [1]


def test_a_mark_left_in_the_ledger_makes_the_next_one_count(opened: Opening, folder: Path) -> None:
    first = opened()
    put(first, 1, 2, 3)
    raw = bytearray((folder / LEDGER).read_bytes())
    raw[8:16] = (12345).to_bytes(8, "little")
    raw[-8:] = (1).to_bytes(8, "little")
    (folder / LEDGER).write_bytes(bytes(raw))

    assert first.usage() == real(folder) == (3 * SIZE, 3)


@pytest.mark.parametrize("call", ["rename", "after rename", "remove", "after remove"])
def test_a_process_that_dies_at_a_change_does_not_mislead_another_that_lives(
    opened: Opening, folder: Path, call: str
) -> None:
    survivor = opened()
    put(survivor, *range(10))
    disk = FaultyDisk()
    dying = FileStorage(folder, QUOTA, disk)
    disk.die_at(call)
    with pytest.raises(Crashed):
        put(dying, 10)
    dying._ledger.close()  # as the system does for a dead process
    dying._temps._lock.close()

    assert survivor.usage() == real(folder)
    assert put(survivor, 11) == [Outcome.STORED]
    assert survivor.usage() == real(folder) == (QUOTA, 10)


def test_a_value_has_its_name_only_when_the_device_has_its_bytes(opened: Opening, mocker: MockerFixture) -> None:
    flushed = mocker.spy(os, "fsync")
    seen: list[int] = []
    disk = FaultyDisk()
    disk.before_rename = lambda: seen.append(flushed.call_count)
    storage = opened(disk=disk)

    put(storage, 1, 2, 3)

    assert seen == [1, 2, 3]


def test_a_lock_that_nobody_lets_go_of_costs_the_write_and_not_the_thread(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, 1)
    with (folder / LEDGER).open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        short = time.monotonic() + 0.05
        assert storage.set([(key(2), (b"value",))], short) == [Outcome.LATE]
        assert storage.delete([key(1)], time.monotonic() + 0.05) == [Outcome.LATE]
        assert there(storage, 1) == [1]
        assert storage.usage() == (SIZE, 1)  # as it last was

    assert temps(folder) == []
    assert put(storage, 2) == [Outcome.STORED]


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "rename"])
@pytest.mark.parametrize(
    ("number", "outcome"),
    [
        (errno.ENOSPC, Outcome.FULL),
        (errno.EDQUOT, Outcome.FULL),
        (errno.EACCES, Outcome.DENIED),
        (errno.EROFS, Outcome.DENIED),
        (errno.EIO, Outcome.FAULT),
    ],
)
def test_a_write_that_fails_is_told_and_leaves_nothing(
    opened: Opening, folder: Path, call: str, number: int, outcome: Outcome
) -> None:
    disk = FaultyDisk()
    storage = opened(disk=disk)
    put(storage, 1, 2)

    disk.fail_next(call, number)
    assert put(storage, 3, 4) == [outcome, Outcome.STORED]
    disk.fail_next(call, number)
    assert put(storage, 1, size=50) == [outcome]

    assert there(storage, 1, 2, 3, 4) == [1, 2, 4]
    assert temps(folder) == []
    assert storage.usage() == real(folder) == (3 * SIZE, 3)


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(errno.EIO, Outcome.FAULT), (errno.EACCES, Outcome.DENIED), (errno.ENOENT, Outcome.ABSENT)],
)
def test_a_read_that_fails_is_a_miss(opened: Opening, folder: Path, number: int, outcome: Outcome) -> None:
    disk = FaultyDisk()
    storage = opened(disk=disk)
    put(storage, 1)

    disk.fail_next("read", number)
    assert [got.outcome for got in storage.get([key(1), key(1)], soon())] == [outcome, Outcome.HIT]
    disk.fail_next("size", number)
    assert storage.exists([key(1), key(1)], soon()) == [outcome, Outcome.HIT]

    assert storage.usage() == real(folder) == (SIZE, 1)


def test_what_cannot_be_evicted_is_passed_over(opened: Opening, folder: Path) -> None:
    disk = FaultyDisk()
    storage = opened(disk=disk)
    put(storage, *range(10))

    disk.fail_next("remove", errno.EACCES)
    assert put(storage, 10) == [Outcome.STORED]

    assert there(storage, *range(11)) == [0, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert storage.usage() == real(folder) == (QUOTA, 10)


def test_what_could_not_be_evicted_goes_after_all_others(opened: Opening, folder: Path) -> None:
    disk = FaultyDisk()
    storage = opened(disk=disk)
    put(storage, *range(10))
    disk.fail_next("remove", errno.EACCES)
    put(storage, 10)

    put(storage, *range(11, 19))
    assert {entry.key for entry in entries(folder)} == {key(number) for number in (0, *range(10, 19))}
    put(storage, 19)

    assert there(storage, *range(20)) == [*range(10, 20)]
    assert storage.usage() == real(folder) == (QUOTA, 10)


def test_what_could_not_be_evicted_is_missed_when_somebody_removes_it(opened: Opening, folder: Path) -> None:
    disk = FaultyDisk()
    storage = opened(disk=disk)
    put(storage, *range(10))
    disk.fail_next("remove", errno.EACCES)
    put(storage, 10)
    value_path(folder, key(0)).unlink()

    assert there(storage, 0) == []

    assert storage.usage() == real(folder) == (QUOTA - SIZE, 9)


def test_where_nothing_can_be_evicted_the_value_is_refused(opened: Opening, folder: Path) -> None:
    disk = FaultyDisk()
    storage = opened(disk=disk)
    put(storage, *range(10))

    disk.fail_always("remove", errno.EACCES)
    refused = put(storage, 10)
    disk.mend()

    assert refused == [Outcome.FULL]
    assert storage.usage() == real(folder) == (QUOTA, 10)
    assert put(storage, 11) == [Outcome.STORED]
    assert real(folder) == (QUOTA, 10)


def test_a_value_that_somebody_removed_is_a_miss_and_no_longer_counts(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, *range(10))
    for number in (3, 4):
        value_path(folder, key(number)).unlink()

    assert there(storage, *range(10)) == [0, 1, 2, 5, 6, 7, 8, 9]

    assert storage.usage() == real(folder) == (8 * SIZE, 8)
    put(storage, 10, 11)
    assert there(storage, *range(12)) == [0, 1, 2, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize("meet", ["read", "overwrite", "delete", "evict", "exists"])
def test_a_value_that_vanished_is_counted_out_however_it_is_met(opened: Opening, folder: Path, meet: str) -> None:
    put(opened(), *range(10))
    storage = opened()  # which has just counted, and so has no other reason to do it again
    value_path(folder, key(0)).unlink()

    {
        "read": lambda: there(storage, 0),
        "overwrite": lambda: put(storage, 0),
        "delete": lambda: storage.delete([key(0)], soon()),
        "evict": lambda: put(storage, 10),
        "exists": lambda: storage.exists([key(0)], soon()),
    }[meet]()

    assert storage.usage() == real(folder)


def test_a_value_that_was_cut_is_given_as_it_is_and_counted_as_it_is(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, 1, 2)
    os.truncate(value_path(folder, key(1)), 40)

    (got,) = storage.get([key(1)], soon())

    assert got == (Outcome.HIT, payload(1, SIZE)[:40])  # that it is too short, the codec says
    assert storage.usage() == real(folder) == (SIZE + 40, 2)


def test_a_folder_that_vanishes_is_made_again(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, *range(5))
    shutil.rmtree(folder)

    assert there(storage, *range(5)) == []
    assert storage.usage() == (0, 0)
    assert put(storage, 7) == [Outcome.STORED]
    assert there(storage, *range(8)) == [7]

    shutil.rmtree(folder)
    assert put(storage, 8) == [Outcome.STORED]
    assert storage.usage() == real(folder) == (SIZE, 1)


@pytest.mark.parametrize("part", [TEMPS, LEDGER])
def test_a_part_of_the_folder_that_vanishes_is_made_again(opened: Opening, folder: Path, part: str) -> None:
    storage = opened()
    put(storage, 1, 2)
    shutil.rmtree(folder / part) if part == TEMPS else (folder / part).unlink()

    assert put(storage, 3) == [Outcome.STORED]

    assert there(storage, 1, 2, 3) == [1, 2, 3]
    assert storage.usage() == real(folder) == (3 * SIZE, 3)


def test_a_folder_that_cannot_be_made_again_is_a_fault(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, 1)
    shutil.rmtree(folder)
    folder.write_bytes(b"in the way")

    assert there(storage, 1) == []
    assert put(storage, 1) == [Outcome.FAULT]
    assert storage.delete([key(1)], soon()) == [Outcome.ABSENT]
    assert storage.clear(soon()) == 0

    folder.unlink()
    assert put(storage, 2) == [Outcome.STORED]


@pytest.mark.parametrize("what", ["a file", "below a file"])
def test_a_place_that_cannot_be_a_folder_is_refused(folder: Path, what: str) -> None:
    folder.write_bytes(b"")
    place = folder if what == "a file" else folder / "deeper"

    with pytest.raises(ConfigError, match="a folder that can be written to") as refusal:
        FileStorage(place, QUOTA)

    assert refusal.value.field == "hicache_storage_path"


def test_after_close_nothing_is_written(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, 1)
    storage.close()

    assert put(storage, 2) == [Outcome.FAULT]

    assert real(folder) == (SIZE, 1)
    assert temps(folder) == []
    opened()


def test_the_check_finds_a_wrong_ledger(opened: Opening, folder: Path) -> None:
    storage = opened()
    put(storage, 1)
    value_path(folder, key(2)).parent.mkdir(exist_ok=True)
    value_path(folder, key(2)).write_bytes(b"slipped in")

    with pytest.raises(IntegrityError, match="ledger says"):
        storage.check_integrity()

    value_path(folder, key(2)).unlink()
