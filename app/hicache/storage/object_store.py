"""Values as objects: in S3, in Google Cloud Storage, in a folder, or in memory, as a URL says.

The keys of one call travel side by side, on an event loop in a thread of this storage, and what has not come by the
deadline is given up. Nothing is tried again here: the workers do that for every backend. The service decides how long
objects live (a lifecycle rule of the bucket), so there is no quota.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import PermissionDeniedError, UnauthenticatedError
from obstore.store import from_url

from app.errors import ConfigError
from app.hicache.storage.base import (
    KEY_BYTES,
    Capabilities,
    Deadline,
    Got,
    Outcome,
    PageKey,
    Parts,
    Usage,
    has_passed,
    remaining_s,
)
from app.hicache.storage.file_layout import key_of, value_name

PROBE_S = 10.0
CLIENT_PREFIX = "client_"
STORE_PREFIXES = ("aws_", "google_", "azure_")
_MAX_CONCURRENT = 32

Item = TypeVar("Item")
Result = TypeVar("Result")


class ObjectStorage:
    """The objects under one URL: s3://bucket/folder, gs://bucket/folder, file:///folder or memory:///."""

    def __init__(self, url: str, options: Mapping[str, str]) -> None:
        """Asks for an object that is not there, so that a wrong name or key is known now: ConfigError.

        options: of the store (aws_region, aws_endpoint, google_service_account, ...; what is not given is taken from
        where the service's own tools take it), and with the prefix client_ of the HTTP client (client_allow_http).
        """
        self._url = url
        self._store = _open_store(url, options)
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="object-storage", daemon=True)
        self._thread.start()
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        try:
            self._probe()
        except Exception as error:
            self.close()
            raise _refused(url, error) from error

    @property
    def capabilities(self) -> Capabilities:
        is_memory = self._url.startswith("memory:")
        return Capabilities(persistent=not is_memory, shared=not is_memory)

    def exists(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        return self._each(self._exists, keys, deadline, lambda outcome: outcome)

    def get(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Got]:
        return self._each(self._get, keys, deadline, Got)

    def set(self, values: Sequence[tuple[PageKey, Parts]], deadline: Deadline) -> list[Outcome]:
        """Copies each value once, so that nothing reads the parts when the call was given up."""
        return self._each(self._set, values, deadline, lambda outcome: outcome)

    def delete(self, keys: Sequence[PageKey], deadline: Deadline) -> list[Outcome]:
        return self._each(self._delete, keys, deadline, lambda outcome: outcome)

    def clear(self, deadline: Deadline) -> int:
        if self._is_closed or has_passed(deadline):
            return 0
        return asyncio.run_coroutine_threadsafe(self._clear(deadline), self._loop).result()

    def usage(self) -> Usage | None:
        return None

    def close(self) -> None:
        """Gives up what still runs."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def check_integrity(self) -> None:
        """Nothing is believed here that could be wrong."""

    def _each(
        self,
        call: Callable[[Item], Awaitable[Result]],
        items: Sequence[Item],
        deadline: Deadline,
        failed: Callable[[Outcome], Result],
    ) -> list[Result]:
        if self._is_closed:
            return [failed(Outcome.CLOSED) for _ in items]
        if has_passed(deadline):
            return [failed(Outcome.LATE) for _ in items]

        async def one(item: Item) -> Result:
            try:
                async with asyncio.timeout(_timeout(deadline)), self._slots:
                    return await call(item)
            except Exception as error:
                return failed(_outcome_of(error))

        async def each() -> list[Result]:
            return await asyncio.gather(*map(one, items))

        return asyncio.run_coroutine_threadsafe(each(), self._loop).result()

    async def _exists(self, key: PageKey) -> Outcome:
        await obstore.head_async(self._store, value_name(key))
        return Outcome.HIT

    async def _get(self, key: PageKey) -> Got:
        found = await obstore.get_async(self._store, value_name(key))
        return Got(Outcome.HIT, memoryview(await found.bytes_async()))

    async def _set(self, value: tuple[PageKey, Parts]) -> Outcome:
        key, parts = value
        await obstore.put_async(self._store, value_name(key), b"".join(parts), use_multipart=False)
        return Outcome.STORED

    async def _delete(self, key: PageKey) -> Outcome:
        # A service says nothing when it deletes what is not there.
        await obstore.head_async(self._store, value_name(key))
        await obstore.delete_async(self._store, value_name(key))
        return Outcome.DELETED

    async def _clear(self, deadline: Deadline) -> int:
        num_removed = 0
        try:
            async with asyncio.timeout(_timeout(deadline)):
                async for found in obstore.list(self._store):
                    ours = [entry["path"] for entry in found if key_of(entry["path"]) is not None]
                    await obstore.delete_async(self._store, ours)
                    num_removed += len(ours)
        except Exception:
            return num_removed
        return num_removed

    def _probe(self) -> None:
        async def probe() -> None:
            async with asyncio.timeout(PROBE_S):
                await obstore.head_async(self._store, value_name(PageKey(bytes(KEY_BYTES))))

        try:
            asyncio.run_coroutine_threadsafe(probe(), self._loop).result()
        except FileNotFoundError:
            return


def _open_store(url: str, options: Mapping[str, str]) -> Any:
    for name in options:
        if not name.startswith((CLIENT_PREFIX, *STORE_PREFIXES)):
            allowed = f"names begin with {', '.join((CLIENT_PREFIX, *STORE_PREFIXES))}"
            raise ConfigError(field="hicache_storage_options", value=name, allowed=allowed)
    client = {
        name.removeprefix(CLIENT_PREFIX): text for name, text in options.items() if name.startswith(CLIENT_PREFIX)
    }
    config = {name: text for name, text in options.items() if not name.startswith(CLIENT_PREFIX)}
    arguments: dict[str, Any] = {"config": config} if config else {}
    if url.startswith("file:"):
        arguments["mkdir"] = True
    elif not url.startswith("memory:"):
        arguments["client_options"] = client
        arguments["retry_config"] = {"max_retries": 0, "retry_timeout": timedelta(seconds=PROBE_S)}
    try:
        return from_url(url, **arguments)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library panics at some settings, which is no Exception
        raise _refused(url, error) from error


def _refused(url: str, error: BaseException) -> ConfigError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return ConfigError(field="hicache_storage_path", value=url, allowed=f"the URL of an object store: {reason}")


def _outcome_of(error: Exception) -> Outcome:
    match error:
        case FileNotFoundError():
            return Outcome.ABSENT
        case TimeoutError():
            return Outcome.LATE
        case PermissionError() | PermissionDeniedError() | UnauthenticatedError():
            return Outcome.DENIED
        case _:
            return Outcome.FAULT


def _timeout(deadline: Deadline) -> float | None:
    return None if deadline == math.inf else remaining_s(deadline)
