"""The calls to the file system that the file storage makes, and what their errors mean. A test puts faults here."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from app.hicache.storage.base import Outcome, Parts

_OUTCOMES = {
    errno.ENOENT: Outcome.ABSENT,
    errno.ENOTDIR: Outcome.ABSENT,
    errno.ENOSPC: Outcome.FULL,
    errno.EDQUOT: Outcome.FULL,
    errno.EFBIG: Outcome.TOO_LARGE,
    errno.EACCES: Outcome.DENIED,
    errno.EPERM: Outcome.DENIED,
    errno.EROFS: Outcome.DENIED,
    errno.ETIMEDOUT: Outcome.LATE,
}


def outcome_of(error: OSError) -> Outcome:
    """What an error of the file system means for the key."""
    return Outcome.FAULT if error.errno is None else _OUTCOMES.get(error.errno, Outcome.FAULT)


class Disk:
    """Each call raises OSError, and does all or leaves at most a file under the name that it was given."""

    def write(self, path: Path, parts: Parts) -> None:
        """Make a file of `parts`, with the present as its time, and wait until the device has it."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            views = [memoryview(part) for part in parts]
            while views:
                written = os.writev(file, views)
                while views and written >= len(views[0]):
                    written -= len(views.pop(0))
                if views:
                    views[0] = views[0][written:]
            _stamp(file)
            os.fsync(file)
        finally:
            os.close(file)

    def read(self, path: Path) -> bytes:
        """The file's bytes; its time becomes the present, which is what makes it the newest for every process."""
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            wanted = os.fstat(file).st_size
            value = os.read(file, wanted)
            while len(value) < wanted and (more := os.read(file, wanted - len(value))):
                value += more
            _stamp(file)
            return value
        finally:
            os.close(file)

    def rename(self, source: Path, target: Path) -> None:
        """`target`, if it is there, is replaced. Makes its folder if need be."""
        try:
            os.replace(source, target)
        except FileNotFoundError:
            os.makedirs(target.parent, exist_ok=True)
            os.replace(source, target)

    def remove(self, path: Path) -> None:
        os.unlink(path)

    def size(self, path: Path) -> int:
        return os.stat(path).st_size


def _stamp(file: int) -> None:
    # The system's own stamps are as coarse as its clock ticks. A file that cannot be stamped (another user's, or on a
    # device that is read-only) can be read all the same; it is then as old as it was.
    now = time.time_ns()
    with contextlib.suppress(OSError):
        os.utime(file, ns=(now, now))
