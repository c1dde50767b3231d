"""The storage that comes and goes: in which order control and storage are told, and what is left when one refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pytest_mock import MockerFixture

from app.config.server_args import ServerArgs
from app.observability.tier_metrics import TierCollector
from app.server import served_tiers
from app.server.openai_errors import ApiError, shutting_down
from app.server.schemas import AttachStorageRequest
from app.server.served_tiers import ServedTiers
from tests.unit.server.test_tier_state import READING

ARGS = ServerArgs(enable_hierarchical_cache=True)
MEMORY = AttachStorageRequest(hicache_storage_backend="memory")


class Engine:
    """Answers at once, while it is open."""

    is_closed = False
    is_stuck = False

    async def ask(self, question: Callable[[], Any]) -> Any:
        if self.is_closed:
            raise shutting_down()
        if self.is_stuck:
            await asyncio.Event().wait()
        return question()


class Site:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.engine = Engine()
        self.reads = iter([READING, *[READING] * 10])
        told = self.calls.append
        self.storage = SimpleNamespace(storage=None, attach=self.attach, clear=self.clear, close=self.close)
        control = SimpleNamespace(
            attach_storage=lambda seed: told("control attaches"), detach_storage=lambda: told("control detaches")
        )
        parts: Any = SimpleNamespace(
            args=ARGS, control=control, storage=self.storage, seed=lambda namespace: b"", read=lambda: next(self.reads)
        )
        self.tiers = ServedTiers(self.engine, parts)  # type: ignore[arg-type]

    def attach(self, opening: object) -> None:
        self.calls.append("storage opens")
        self.storage.storage = object()

    def clear(self, timeout_s: float) -> int:
        self.calls.append("storage clears")
        return 3

    def close(self) -> None:
        self.calls.append("storage closes")
        self.storage.storage = None


@pytest.fixture
def site() -> Iterator[Site]:
    made = Site()
    yield made
    assert isinstance(made.tiers.collector, TierCollector)


def test_control_asks_a_storage_only_while_it_is_open(site: Site) -> None:
    async def use() -> None:
        await site.tiers.attach(MEMORY)
        assert await site.tiers.detach()

    asyncio.run(use())

    assert site.calls == ["storage opens", "control attaches", "control detaches", "storage closes"]


def test_control_forgets_what_it_knew_of_a_storage_once_it_is_cleared(site: Site) -> None:
    async def use() -> int:
        await site.tiers.attach(MEMORY)
        site.calls.clear()
        return await site.tiers.clear(1.0)

    assert asyncio.run(use()) == 3
    assert site.calls == ["storage clears", "control attaches"]


def test_a_storage_that_control_cannot_take_any_more_is_closed(site: Site) -> None:
    site.engine.is_closed = True

    with pytest.raises(ApiError):
        asyncio.run(site.tiers.attach(MEMORY))

    assert site.calls == ["storage opens", "storage closes"]


@pytest.mark.parametrize("trouble", ["is_closed", "is_stuck"])
def test_an_engine_that_does_not_answer_keeps_nobody_from_the_last_reading(
    site: Site, trouble: str, mocker: MockerFixture
) -> None:
    mocker.patch.object(served_tiers, "_PATIENCE_S", 0.01)
    setattr(site.engine, trouble, True)

    assert asyncio.run(site.tiers.refresh()) is READING
