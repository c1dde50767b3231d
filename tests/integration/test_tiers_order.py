"""In what order a step with a backup is dispatched, and that nobody waits for what travels beside it.

gather  ->  the step's programs  ->  copy to the host begins  ->  the step is read, the next dispatched  ->  it is over
                                             `---- beside whatever the device computes; nobody waits for it ----'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from pytest_mock import MockerFixture

from app.core.batch import PreparedBatch
from app.tpu.page_carrier import PoolContents
from app.tpu.page_carriers import ArraysCarrier
from app.tpu.tier_copies import DeviceCopies, TierCopies, TierCopy
from tests.support.tiered_engine import MODELS, FatedCopies, TieredSite, tier_fields, tiered_site, with_copies

LOOKS = 3  # at a copy, until it is over


class Happened(NamedTuple):
    """what: "execute", "gather", "copy", "compute", "read": by step; "taken": of the copies that the step began."""

    what: str
    step: int


class RecordedCopy:
    """A TierCopy that is over when it was looked at a few times. Whoever would wait for it fails."""

    def __init__(self, copy: TierCopy, taken: Callable[[], None]) -> None:
        self._copy = copy
        self._taken = taken
        self._looks = 0
        self.num_bytes = copy.num_bytes

    def ready(self) -> bool:
        self._looks += 1
        if self._looks < LOOKS:
            return False
        self._copy.result()
        return True

    def result(self) -> PoolContents:
        assert self._looks >= LOOKS, "somebody waits for a copy"
        self._taken()
        return self._copy.result()


class RecordedCopies(FatedCopies):
    """Notes where copies to the host begin and are taken."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self._record = record

    def begin(self, carriers: Any) -> TierCopies:
        self._real = DeviceCopies(carriers)
        return super().begin(carriers)

    def to_host(self, contents: PoolContents) -> TierCopy:
        step = self._record.step
        self._record.note("copy")
        return RecordedCopy(self._real.to_host(contents), lambda: self._record.events.append(Happened("taken", step)))


class Record:
    def __init__(self) -> None:
        self.events: list[Happened] = []
        self.step = 0  # the last one that was dispatched

    def note(self, what: str) -> None:
        self.events.append(Happened(what, self.step))

    def watch(self, site: TieredSite, mocker: MockerFixture) -> None:
        """Notes what the engine dispatches and reads from now on."""
        runtime = site.engine.runtime
        execute = runtime.execute_batch

        def execute_batch(prepared: PreparedBatch) -> Any:
            self.step += 1
            self.note("execute")
            handle, step = execute(prepared), self.step
            wait = handle.wait

            def read() -> Any:
                completion = wait()
                self.events.append(Happened("read", step))
                return completion

            mocker.patch.object(handle, "wait", read)
            return handle

        mocker.patch.object(runtime, "execute_batch", execute_batch)
        self._before(mocker, ArraysCarrier, "gather", "gather")
        for program in ("decode", "extend"):
            self._before(mocker, type(site.engine.container.model_runner()), program, "compute")

    def _before(self, mocker: MockerFixture, owner: Any, method: str, what: str) -> None:
        plain = getattr(owner, method)

        def noted(*arguments: Any) -> Any:
            self.note(what)
            return plain(*arguments)

        mocker.patch.object(owner, method, noted)

    def first(self, what: str, step: int) -> int | None:
        happened = Happened(what, step)
        return self.events.index(happened) if happened in self.events else None

    def last(self, what: str, step: int) -> int:
        return len(self.events) - 1 - self.events[::-1].index(Happened(what, step))


@pytest.mark.parametrize(
    "model", [model if model == "all" else pytest.param(model, marks=pytest.mark.slow) for model in MODELS]
)
def test_a_backup_is_dispatched_before_its_step_and_travels_beside_the_next(model: str, mocker: MockerFixture) -> None:
    record = Record()
    fields = tier_fields(page_size=4, max_total_tokens=256, context_length=128, chunked_prefill_size=16)
    with tiered_site(model, overrides=with_copies(RecordedCopies(record)), **fields) as site:
        record.watch(site, mocker)
        for number in range(6):
            site.engine.add([number] * 40, max_tokens=12, ignore_eos=True)
            site.step(5)
        site.finish()

    with_rows = with_backup = 0
    for step in {event.step for event in record.events if event.what == "copy"}:
        with_backup += 1
        copied, computed = record.last("copy", step), record.first("compute", step)
        gathered = record.last("gather", step)
        # Gathered first, then computed: the programs may overwrite what was gathered. Then on its way, before a wait.
        assert record.first("execute", step) < record.first("gather", step)
        assert gathered < record.first("copy", step)
        assert copied < record.first("read", step)
        if computed is not None:
            with_rows += 1
            assert gathered < computed < record.first("copy", step)
        # Its own step is over, or another one was dispatched, before anybody takes it; and nobody waited for it.
        taken = record.first("taken", step)
        assert taken is not None
        assert taken > copied
        assert record.first("execute", step + 1) < taken
    assert with_backup >= 6
    assert with_rows >= 3
