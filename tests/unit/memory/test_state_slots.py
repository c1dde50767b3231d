"""Snapshots: reserved as far as there are any, never twice, refused before anything changes."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.batch import Admission, BatchPlan
from app.core.handles import CacheIdentity, Generation, RuntimeId
from app.core.sampling import SamplingParams
from app.errors import DoubleFreeError, OwnershipError, StaleHandleError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.state_slots import StateSlots

IDENTITY = CacheIdentity(RuntimeId("test"), Generation(1))


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.fixture
def allocator():
    allocator = PagedTokenToKVPoolAllocator(3, 1, IDENTITY)
    yield allocator
    StateSlots(allocator=allocator).check_integrity()


def plan(*wanted: bool, **fields: object) -> BatchPlan:
    """As many decoding rows as are asked about."""
    rows = np.arange(len(wanted), dtype=np.int32)
    return BatchPlan(identity=IDENTITY, decode_slots=rows, snapshots=np.array(wanted, np.bool_), **fields)


def test_rows_that_come_too_late_get_none(allocator) -> None:
    states = StateSlots(allocator=allocator)
    slots = states.reserve(plan(True, False, True, True, True))
    assert slots[[1, 4]].tolist() == [0, 0]
    assert np.unique(slots[[0, 2, 3]]).size == 3
    assert states.num_free == 0
    assert states.reserve(plan(True)).tolist() == [0]


def test_a_plan_without_wishes_reserves_nothing(allocator) -> None:
    states = StateSlots(allocator=allocator)
    assert states.reserve(BatchPlan(identity=IDENTITY, decode_slots=ints(0, 1))).tolist() == [0, 0]
    assert states.num_free == 3


def test_a_discarded_batch_gives_back_what_it_reserved(allocator) -> None:
    states = StateSlots(allocator=allocator)
    states.undo(states.reserve(plan(True, False, True)))
    assert states.num_free == 3


def test_freed_snapshots_are_handed_out_again(allocator) -> None:
    states = StateSlots(allocator=allocator)
    held = allocator.allocate(3)
    allocator.port.free(held[:1])
    wanted = plan(True, True, free_states=held[:1])
    states.begin(wanted)
    assert states.reserve(wanted).tolist() == [held[0], 0]


def test_what_is_not_the_plans_to_name_is_refused(allocator) -> None:
    states = StateSlots(allocator=allocator)
    held = allocator.allocate(1)
    start = Admission(prefix_pages=ints(), prompt_length=1, token_ids=ints(0), sampling=SamplingParams(seed=0), state=3)
    for wrong, error in (
        (plan(free_states=held), DoubleFreeError),
        (plan(admissions=(start,)), StaleHandleError),
        (BatchPlan(identity=IDENTITY, decode_slots=ints(0, 1), snapshots=np.ones(1, np.bool_)), OwnershipError),
    ):
        with pytest.raises(error):
            states.check_plan(wrong)
