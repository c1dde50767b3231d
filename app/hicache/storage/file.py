"""Values as files in a folder, with a quota: what was not used for longest goes first.

A value is written under a temporary name, flushed to the device and renamed, so that it is there as a whole or not at
all, whenever the process dies. Several processes may use one folder: the figures of the quota are in a ledger that
they share, and a value that another one wrote is found by its name. Each process evicts by its own order of use, which
it takes from the files' times when it starts.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from app.errors import ConfigError, IntegrityError
from app.hicache.storage.base import (
    Capabilities,
    Deadline,
    Got,
    Outcome,
    PageKey,
    Parts,
    Usage,
    has_passed,
    size_of,
)
from app.hicache.storage.disk import Disk, outcome_of
from app.hicache.storage.file_layout import LEDGER, TEMPS, entries, value_path
from app.hicache.storage.file_ledger import DirectoryLedger, Totals
from app.hicache.storage.file_temps import TempNames

_GONE = (FileNotFoundError, NotADirectoryError)
_PATIENCE_S = 60.0  # for another process that counts a large folder
_USAGE_S = 1.0


class FileStorage:
    """The values under one folder, at most `capacity_bytes` of them, headers included.

    Values being written come on top, one a thread that writes. A file with a name that is not ours is left alone and
    not counted. A value that somebody else removed or cut is noticed when it is used, and the folder counted anew.
    """

    def __init__(self, root: Path, capacity_bytes: int, disk: Disk | None = None) -> None:
        """Takes in what is there: O(files). ConfigError where the folder cannot be used."""
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._disk = disk or Disk()
        self._lock = threading.Lock()  # guards the fields below; never held during a call to the system
        self._sizes: OrderedDict[PageKey, int] = OrderedDict()  # values that this process knows, oldest use first
        self._own_changes = 0  # of the ledger's, since the folder was last counted
        self._changes_at_count = 0
        self._num_surprises = 0  # values found missing or with another size, since then
        self._num_locked = 0  # times that the ledger was locked, since then
        self._usage = Usage(0, 0)
        self._reopening = threading.Lock()
        self._is_closed = False
        try:
            self._temps, self._ledger = self._open()
            with self._locked(_patiently()) as totals:
                self._count_anew(totals)
                self._make_room(totals, 0, None)
        except OSError as error:
            raise ConfigError(
                field="hicache_storage_path", value=str(root), allowed=f"a folder that can be written to: {error}"
            ) from error

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=True, shared=True, max_value_bytes=self._capacity_bytes)

    def exists(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        """One look at the file system a key."""
        return [Outcome.LATE if has_passed(deadline) else self._exists(key, deadline) for key in keys]

    def get(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Got]:
        """One read a key, in this thread."""
        return [Got(Outcome.LATE) if has_passed(deadline) else self._get(key, deadline) for key in keys]

    def set(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        """One write, flush and rename a value, in this thread. Evicts until the value fits."""
        return [Outcome.LATE if has_passed(deadline) else self._set(key, parts, deadline) for key, parts in values]

    def delete(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        return [Outcome.LATE if has_passed(deadline) else self._delete(key, deadline) for key in keys]

    def clear(self, deadline: Deadline) -> int:
        num_removed = 0
        with contextlib.suppress(OSError), self._relocked(deadline) as totals:
            for entry in entries(self._root):
                if has_passed(deadline):
                    break
                with contextlib.suppress(OSError):
                    self._disk.remove(entry.path)
                    num_removed += 1
            self._count_anew(totals)
        return num_removed

    def usage(self) -> Usage:
        """As the ledger says, or where it cannot be had, as it last did."""
        with contextlib.suppress(OSError), self._relocked(time.monotonic() + _USAGE_S):
            pass
        return self._usage

    def close(self) -> None:
        self._is_closed = True
        self._temps.close()
        self._ledger.close()

    def check_integrity(self) -> None:
        """The ledger and the folder agree. A closed storage believes nothing."""
        if self._is_closed:
            return
        with self._relocked(_patiently()) as totals:
            found = {entry.key: entry.num_bytes for entry in entries(self._root)}
            real = (sum(found.values()), len(found))
            if (totals.num_bytes, totals.num_values) != real:
                raise IntegrityError(owner="FileStorage", broken=f"ledger says {totals}, the folder has {real}")

    # -- one key -----------------------------------------------------------------------------------------------------

    def _exists(self, key: PageKey, deadline: Deadline) -> Outcome:
        try:
            num_bytes = self._disk.size(value_path(self._root, key))
        except OSError as error:
            return self._miss(key, error, deadline)
        with self._lock:
            self._sizes.setdefault(key, num_bytes)
        return Outcome.HIT

    def _get(self, key: PageKey, deadline: Deadline) -> Got:
        try:
            value = self._disk.read(value_path(self._root, key))
        except OSError as error:
            return Got(self._miss(key, error, deadline))
        with self._lock:
            is_surprise = self._sizes.get(key, len(value)) != len(value)
            self._sizes[key] = len(value)
            self._sizes.move_to_end(key)
        if is_surprise:
            self._surprised(deadline)
        return Got(Outcome.HIT, value)

    def _set(self, key: PageKey, parts: Parts, deadline: Deadline) -> Outcome:
        num_bytes = size_of(parts)
        if num_bytes > self._capacity_bytes:
            return Outcome.TOO_LARGE
        try:
            return self._write(key, parts, num_bytes, deadline)
        except _GONE:
            pass  # a folder: made again below
        except OSError as error:
            return outcome_of(error)
        try:
            self._reopen()
            return self._write(key, parts, num_bytes, deadline)
        except _GONE:
            return Outcome.FAULT
        except OSError as error:
            return outcome_of(error)

    def _write(self, key: PageKey, parts: Parts, num_bytes: int, deadline: Deadline) -> Outcome:
        path, temp = value_path(self._root, key), self._temps.new()
        try:
            self._disk.write(temp, parts)
            with self._locked(deadline) as totals:
                replaced = self._size_now(key, path)
                if not self._make_room(totals, num_bytes - (replaced or 0), key):
                    return Outcome.FULL
                self._disk.rename(temp, path)
                if replaced is not None:
                    self._removed(totals, replaced)
                totals.added(num_bytes)
                with self._lock:
                    self._own_changes += 1
                    self._sizes[key] = num_bytes
                    self._sizes.move_to_end(key)
            return Outcome.STORED
        finally:
            with contextlib.suppress(OSError):  # mostly FileNotFoundError: it has its name now
                self._disk.remove(temp)

    def _delete(self, key: PageKey, deadline: Deadline) -> Outcome:
        path = value_path(self._root, key)
        try:
            with self._locked(deadline) as totals:
                num_bytes = self._size_now(key, path)
                if num_bytes is None:
                    return Outcome.ABSENT
                self._disk.remove(path)
                self._forget(key)
                self._removed(totals, num_bytes)
        except OSError as error:
            return outcome_of(error)
        return Outcome.DELETED

    # -- under the ledger's lock -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self, deadline: Deadline) -> Iterator[Totals]:
        """The ledger's lock; the folder is counted where the ledger cannot be believed, before and after the body."""
        with self._ledger.locked(deadline) as totals:
            if not totals.is_known:
                self._count_anew(totals)
            yield totals
            self._num_locked += 1
            if self._must_count(totals):
                self._count_anew(totals)
            self._usage = Usage(totals.num_bytes, totals.num_values)

    @contextlib.contextmanager
    def _relocked(self, deadline: Deadline) -> Iterator[Totals]:
        """The same, in a folder that is made again where it was taken away."""
        if not self._ledger.is_in_place():
            self._reopen()
        with self._locked(deadline) as totals:
            yield totals

    def _size_now(self, key: PageKey, path: Path) -> int | None:
        """The value's real size, None without one. A surprise, where this process knew another."""
        try:
            num_bytes = self._disk.size(path)
        except FileNotFoundError:
            num_bytes = None
        with self._lock:
            if self._sizes.get(key, num_bytes) != num_bytes:
                self._num_surprises += 1
                self._sizes.pop(key)
        return num_bytes

    def _make_room(self, totals: Totals, num_bytes: int, keep: PageKey | None) -> bool:
        """Evict, oldest first, until `num_bytes` more fit. -> whether they do. Never takes `keep`."""
        is_counted = False
        passed_over = {keep}
        while totals.num_bytes + num_bytes > self._capacity_bytes:
            key = self._oldest(passed_over)
            if key is not None:
                if not self._evict(totals, key):
                    passed_over.add(key)
            elif is_counted:
                return False
            else:
                # The others' values are not known here.
                self._count_anew(totals)
                is_counted = True
        return True

    def _oldest(self, passed_over: Set[PageKey | None]) -> PageKey | None:
        with self._lock:
            return next((key for key in self._sizes if key not in passed_over), None)

    def _evict(self, totals: Totals, key: PageKey) -> bool:
        """Remove one value. -> whether it is gone; one that cannot be removed has its turn again after all others."""
        path = value_path(self._root, key)
        num_bytes = self._size_now(key, path)
        self._forget(key)  # before it is gone, so that a reader that misses it is not surprised
        if num_bytes is None:
            return True
        try:
            self._disk.remove(path)
        except FileNotFoundError:
            with self._lock:
                self._num_surprises += 1
        except OSError:
            with self._lock:
                self._sizes[key] = num_bytes
            return False
        else:
            self._removed(totals, num_bytes)
        return True

    def _removed(self, totals: Totals, num_bytes: int) -> None:
        totals.removed(num_bytes)
        with self._lock:
            self._own_changes += 1

    def _forget(self, key: PageKey) -> None:
        with self._lock:
            self._sizes.pop(key, None)

    # -- what others did ---------------------------------------------------------------------------------------------

    def _miss(self, key: PageKey, error: OSError, deadline: Deadline) -> Outcome:
        """What a failed look at a value means."""
        outcome = outcome_of(error)
        if outcome is Outcome.ABSENT:
            with self._lock:
                is_surprise = self._sizes.pop(key, None) is not None
            if is_surprise:
                self._surprised(deadline)
        return outcome

    def _surprised(self, deadline: Deadline) -> None:
        """A value was not as this process left it: count, where that is not another process's doing."""
        with self._lock:
            self._num_surprises += 1
        with contextlib.suppress(OSError), self._relocked(deadline):
            pass

    def _must_count(self, totals: Totals) -> bool:
        """Whether surprises since the last count are more than other processes' changes could explain.

        Those that they could are looked into as well, once in as many calls as there are values: that costs each call
        a constant.
        """
        with self._lock:
            num_explained = totals.changes - self._changes_at_count - self._own_changes
            is_due = self._num_locked >= totals.num_values
            return self._num_surprises > num_explained or (self._num_surprises > 0 and is_due)

    def _count_anew(self, totals: Totals) -> None:
        """Take the figures, and the order of use, from the folder. O(files)."""
        found = sorted(entries(self._root), key=lambda entry: entry.used_ns)
        totals.num_bytes = sum(entry.num_bytes for entry in found)
        totals.num_values = len(found)
        totals.is_known = True
        with self._lock:
            self._sizes = OrderedDict((entry.key, entry.num_bytes) for entry in found)
            self._changes_at_count = totals.changes
            self._own_changes = self._num_surprises = self._num_locked = 0

    def _open(self) -> tuple[TempNames, DirectoryLedger]:
        self._root.mkdir(parents=True, exist_ok=True)
        temps = TempNames(self._root / TEMPS)
        try:
            return temps, DirectoryLedger(self._root / LEDGER)
        except OSError:
            temps.close()
            raise

    def _reopen(self) -> None:
        """The folder was taken away: make it again, and take in what is there now. OSError if it cannot be made."""
        with self._reopening:
            if self._is_closed:
                raise OSError(errno.ESHUTDOWN, "the storage is closed", str(self._root))
            if self._ledger.is_in_place() and self._temps.is_in_place():
                return  # another thread was first
            gone = self._temps, self._ledger
            self._temps, self._ledger = self._open()
            for part in gone:
                part.close()
            with self._locked(_patiently()) as totals:
                self._count_anew(totals)


def _patiently() -> Deadline:
    return time.monotonic() + _PATIENCE_S
