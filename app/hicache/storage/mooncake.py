"""Values in Mooncake Store: memory lent by many processes, found through one master (arXiv:2407.00079).

Every process that opens this storage lends memory to it. The master evicts what nobody used for long, and values are
gone with the process that lends the memory they lie in.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from typing import Any

from app.errors import ConfigError
from app.hicache.storage.base import Capabilities, Deadline, Got, Outcome, PageKey, Parts, Usage, has_passed

PREFIX = "tpukv/"
DEFAULT_OPTIONS = {"hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp", "devices": ""}
CONNECT_S = 10.0
BUFFER_BYTES = 64 * 2**20

_OK = 0
_NO_SUCH_OBJECT = -704
_NO_ROOM = -200


class MooncakeStorage:
    """One client of one master.

    A call has no deadline of its own: one that meets a dead master comes back with a fault after a few seconds, when
    the client's own limits end it. The deadline is looked at between keys, and the workers answer in time.
    """

    def __init__(self, master: str, lent_bytes: int, options: Mapping[str, str]) -> None:
        """`master`: HOST:PORT. options: hostname, under which other clients reach this one; metadata_server; protocol
        (tcp or rdma); devices. ConfigError without the package, and where no master answers.
        """
        for name in options:
            if name not in DEFAULT_OPTIONS:
                allowed = f"known options are {', '.join(DEFAULT_OPTIONS)}"
                raise ConfigError(field="hicache_storage_options", value=name, allowed=allowed)
        chosen = {**DEFAULT_OPTIONS, **options}
        self._client: Any = _new_client()
        _require_listener(master)
        code = self._client.setup(
            chosen["hostname"],
            chosen["metadata_server"],
            lent_bytes,
            BUFFER_BYTES,
            chosen["protocol"],
            chosen["devices"],
            master,
        )
        self._is_closed = False
        if code != _OK:
            raise _no_master(master, f"the client could not be set up (code {code})")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(persistent=False, shared=True)

    def exists(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        """One call for all keys."""
        if (refusal := self._refusal(deadline)) is not None:
            return [refusal] * len(keys)
        try:
            found = self._client.batch_is_exist([_name(key) for key in keys])
        except Exception:
            return [Outcome.FAULT] * len(keys)
        known = {1: Outcome.HIT, 0: Outcome.ABSENT}
        return [known.get(code, Outcome.FAULT) for code in found]

    def get(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Got]:
        """One call for all keys, and one more for those that did not come: the client does not say why."""
        if (refusal := self._refusal(deadline)) is not None or not keys:
            return [Got(refusal or Outcome.ABSENT)] * len(keys)
        try:
            values = self._client.get_batch([_name(key) for key in keys])
        except Exception:
            return [Got(Outcome.FAULT)] * len(keys)
        missing = [key for key, value in zip(keys, values, strict=True) if not value]
        is_absent = dict(zip(missing, self.exists(missing, deadline), strict=True)) if missing else {}
        return [
            Got(Outcome.HIT, value) if value else Got(_why_empty(is_absent[key]))
            for key, value in zip(keys, values, strict=True)
        ]

    def set(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        return [self._set(key, parts, deadline) for key, parts in values]

    def delete(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        return [self._delete(key, deadline) for key in keys]

    def clear(self, deadline: Deadline) -> int:
        if self._refusal(deadline) is not None:
            return 0
        try:
            return max(0, int(self._client.remove_by_regex(f"^{PREFIX}", True)))
        except Exception:
            return 0

    def usage(self) -> Usage | None:
        return None

    def close(self) -> None:
        """What lies in this process's memory is lost. Takes many seconds where the master is dead."""
        if not self._is_closed:
            self._is_closed = True
            self._client.close()

    def check_integrity(self) -> None:
        """Nothing is believed here that could be wrong."""

    def _set(self, key: PageKey, parts: Parts, deadline: Deadline) -> Outcome:
        if (refusal := self._refusal(deadline)) is not None:
            return refusal
        try:
            code = self._client.upsert_parts(_name(key), *parts)
        except Exception:
            return Outcome.FAULT
        return {_OK: Outcome.STORED, _NO_ROOM: Outcome.FULL}.get(code, Outcome.FAULT)

    def _delete(self, key: PageKey, deadline: Deadline) -> Outcome:
        if (refusal := self._refusal(deadline)) is not None:
            return refusal
        try:
            code = self._client.remove(_name(key), True)  # also one that was read a moment ago
        except Exception:
            return Outcome.FAULT
        return {_OK: Outcome.DELETED, _NO_SUCH_OBJECT: Outcome.ABSENT}.get(code, Outcome.FAULT)

    def _refusal(self, deadline: Deadline) -> Outcome | None:
        if self._is_closed:
            return Outcome.CLOSED
        return Outcome.LATE if has_passed(deadline) else None


def _why_empty(exists: Outcome) -> Outcome:
    """What a value that did not come is, by what `exists` says of it."""
    return Outcome.FAULT if exists is Outcome.HIT else exists


def _require_listener(master: str) -> None:
    """The client itself tries for a minute and a half."""
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise _no_master(master, str(error)) from error


def _no_master(master: str, reason: str) -> ConfigError:
    return ConfigError(
        field="hicache_storage_path", value=master, allowed=f"HOST:PORT of a running mooncake_master: {reason}"
    )


def _new_client() -> Any:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            field="hicache_storage_backend",
            value="mooncake",
            allowed=(
                "its package cannot be imported: install requirements/mooncake.txt, and on Debian libibverbs1, "
                f"libnl-3-200, libnl-route-3-200 and libnuma1 ({error})"
            ),
        ) from error
    return MooncakeDistributedStore()


def _name(key: PageKey) -> str:
    return PREFIX + key.hex()
