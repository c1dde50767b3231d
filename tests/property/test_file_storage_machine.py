"""The file storage against a dictionary, with faults of the file system, deaths of the process and strangers' hands.

Right is: `get` gives what was last set, or an outcome that stands for a miss; nothing is lost while everything fits in
the quota; the ledger is the folder's real size after each step.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.hicache.storage.base import Outcome
from app.hicache.storage.file import FileStorage
from app.hicache.storage.file_layout import LEDGER, TEMPS, entries, value_path
from tests.support.faulty_disk import Crashed, FaultyDisk
from tests.support.storage import key, soon

NUMBERS = st.integers(0, 11)
SIZES = st.integers(1, 300)
QUOTA = 1000
FAULTS = st.one_of(
    st.tuples(
        st.sampled_from(["write", "read", "rename", "remove", "size"]),
        st.sampled_from([errno.ENOSPC, errno.EIO, errno.EACCES]),
    ),
    st.tuples(st.sampled_from(["write", "read", "rename"]), st.just(errno.ENOENT)),
)
DEATHS = st.sampled_from(["write", "rename", "after rename", "remove", "after remove", "size"])


class FileStorageMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="file-storage-")) / "pages"
        self.disk = FaultyDisk()
        self.values: dict[int, bytes] = {}  # what a hit must be; what was evicted is still here
        self.num_made = 0
        self.is_pressed = False  # whether the quota may have evicted anything
        self.reopen()

    def teardown(self) -> None:
        self.storage.close()
        shutil.rmtree(self.folder.parent)

    # -- what the storage is asked -----------------------------------------------------------------------------------

    @rule(number=NUMBERS, size=SIZES)
    def set(self, number: int, size: int) -> None:
        value = self.made(number, size)
        (outcome,) = self.storage.set([(key(number), (value[: size // 2], value[size // 2 :]))], soon())
        assert outcome is Outcome.STORED or self.disk.num_failed
        if outcome is Outcome.STORED:
            self.values[number] = value

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        (got,) = self.storage.get([key(number)], soon())
        if got.outcome is Outcome.HIT:
            assert got.value == self.values[number]
        elif not self.disk.num_failed:
            assert got.outcome is Outcome.ABSENT
            assert number not in self.values or self.is_pressed

    @rule(number=NUMBERS)
    def exists(self, number: int) -> None:
        (outcome,) = self.storage.exists([key(number)], soon())
        assert outcome is not Outcome.HIT or number in self.values

    @rule(number=NUMBERS)
    def delete(self, number: int) -> None:
        (outcome,) = self.storage.delete([key(number)], soon())
        if outcome in (Outcome.DELETED, Outcome.ABSENT):
            self.values.pop(number, None)
        else:
            assert self.disk.num_failed

    @rule()
    def clear(self) -> None:
        self.storage.clear(soon())
        if not self.disk.num_failed:
            self.lose_all()

    @rule()
    def restart(self) -> None:
        self.storage.close()
        self.reopen()

    # -- what goes wrong ---------------------------------------------------------------------------------------------

    @rule(fault=FAULTS)
    def next_call_fails(self, fault: tuple[str, int]) -> None:
        self.disk.fail_next(*fault)

    @rule(call=DEATHS, number=NUMBERS, size=SIZES)
    def process_dies_while_it_writes(self, call: str, number: int, size: int) -> None:
        self.disk.mend()
        value = self.made(number, size)
        self.disk.die_at(call)
        try:
            self.storage.set([(key(number), (value,))], soon())
            self.values[number] = value
        except Crashed:
            path = value_path(self.folder, key(number))
            if path.exists() and path.read_bytes() == value:
                self.values[number] = value  # else what was there must still be, or have been evicted
        self.disk.mend()
        abandon(self.storage)
        self.reopen()

    @precondition(lambda self: not self.others_wrote)
    @rule(number=NUMBERS)
    def stranger_removes_a_value(self, number: int) -> None:
        value_path(self.folder, key(number)).unlink(missing_ok=True)
        self.values.pop(number, None)
        with self.disk.suspended():
            assert [got.outcome for got in self.storage.get([key(number)], soon())] == [Outcome.ABSENT]

    @precondition(lambda self: not self.others_wrote)
    @rule(number=NUMBERS, size=st.integers(0, 100))
    def stranger_cuts_a_value(self, number: int, size: int) -> None:
        path = value_path(self.folder, key(number))
        if path.exists() and path.stat().st_size > size:
            os.truncate(path, size)
            self.values[number] = self.values[number][:size]
            with self.disk.suspended():
                self.get(number)

    @rule()
    def another_process_writes(self) -> None:
        other = FileStorage(self.folder, QUOTA)
        for number in range(3):
            value = self.made(number, 250)
            assert other.set([(key(number), (value,))], soon()) == [Outcome.STORED]
            self.values[number] = value
        other.close()
        self.others_wrote = True

    @rule(part=st.sampled_from([".", TEMPS, LEDGER]))
    def folder_or_a_part_vanishes(self, part: str) -> None:
        path = self.folder / part
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        if part == ".":
            self.lose_all()

    # -- what holds --------------------------------------------------------------------------------------------------

    @invariant()
    def ledger_is_the_real_size(self) -> None:
        with self.disk.suspended():
            usage = self.storage.usage()
            self.storage.check_integrity()
        found = [entry.num_bytes for entry in entries(self.folder)]
        assert usage == (sum(found), len(found))
        assert sum(found) <= QUOTA

    @invariant()
    def nothing_half_written_is_left(self) -> None:
        assert [path.name for path in (self.folder / TEMPS).glob("*") if path.suffix != ".lock"] == []

    @invariant()
    def faults_are_told_by_the_call_that_meets_them(self) -> None:
        self.disk.num_failed = 0

    # -- parts -------------------------------------------------------------------------------------------------------

    def made(self, number: int, size: int) -> bytes:
        """A value that no other call makes, which will be set now."""
        self.num_made += 1
        value = (f"{number}.{self.num_made};".encode() * size)[:size]
        self.is_pressed |= sum(map(len, {**self.values, number: value}.values())) > QUOTA
        return value

    def lose_all(self) -> None:
        self.values.clear()
        self.is_pressed = False

    def reopen(self) -> None:
        with self.disk.suspended():
            self.storage = FileStorage(self.folder, QUOTA, self.disk)
        self.others_wrote = False


def abandon(storage: FileStorage) -> None:
    """What the system does for a dead process: its files are closed, which drops its locks."""
    storage._ledger.close()
    storage._temps._lock.close()


FileStorageMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_file_storage_equals_a_dictionary = FileStorageMachine.TestCase
