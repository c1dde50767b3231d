"""Names for values that are being written, and the removal of those that a dead process left.

A process is alive while it holds the lock on its lock file, which the system drops when it dies. So neither process
ids, which are given again and differ between containers, nor times are asked.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
from pathlib import Path

_LOCK = ".lock"


class TempNames:
    """The temporary names of one process in one folder."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder, takes a name of its own, and removes what dead processes left. OSError if it cannot."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._counter = itertools.count()
        while True:
            self._token = secrets.token_hex(8)
            path = folder / (self._token + _LOCK)
            self._lock = open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "rb+", buffering=0)  # noqa: SIM115
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # A sweeper may have locked and removed the file between the two calls above.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.stat(path), os.fstat(self._lock.fileno())):
                    break
            self._lock.close()
        _sweep(folder, self._token)

    def new(self) -> Path:
        return self._folder / f"{self._token}.{next(self._counter)}"

    def is_in_place(self) -> bool:
        """Whether the folder still has the lock file."""
        return (self._folder / (self._token + _LOCK)).exists()

    def close(self) -> None:
        """Remove the lock file, and with it the claim to the names."""
        if not self._lock.closed:
            with contextlib.suppress(OSError):
                os.unlink(self._folder / (self._token + _LOCK))
            self._lock.close()


def _sweep(folder: Path, own: str) -> None:
    """Remove the files of every process that no longer holds its lock."""
    names = os.listdir(folder)
    locks = {name.removesuffix(_LOCK) for name in names if name.endswith(_LOCK)}
    dead = {token for token in locks - {own} if _remove_if_dead(folder / (token + _LOCK))}
    for name in names:
        token, _, number = name.rpartition(".")
        if not number.isdecimal() or len(token) != len(own):
            continue
        # Without a lock file its owner is dead as well: swept by somebody who died in between. Asked again, as a new
        # process may have come since the listing.
        if token in dead or not (folder / (token + _LOCK)).exists():
            with contextlib.suppress(OSError):
                os.unlink(folder / name)


def _remove_if_dead(path: Path) -> bool:
    try:
        with open(path, "rb+", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
    except OSError:
        return False
    return True
