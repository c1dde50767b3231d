"""The running requests as arrays: what decodes next, what it takes, and what must hold."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.sampling import SamplingParams
from app.errors import IntegrityError
from app.scheduling.request import Request, Sequence, Status
from app.scheduling.running_table import RunningTable

PAGE_SIZE = 4


def seated(table: RunningTable, slot: int, prompt_length: int, *, end: int, arrival: int = 0) -> Sequence:
    """A sequence whose whole prompt was just dispatched."""
    request = Request(request_id=f"r{slot}", prompt_token_ids=np.arange(prompt_length, dtype=np.int32))
    sequence = Sequence(request, SamplingParams(seed=0), arrival)
    sequence.slot, sequence.generation, sequence.status = slot, 1, Status.DECODE
    sequence.computed = prompt_length
    table.seat(sequence, -(-prompt_length // PAGE_SIZE), end)
    table.start_decoding(slot)
    return sequence


@pytest.fixture
def table() -> RunningTable:
    return RunningTable(4, PAGE_SIZE)


def test_a_row_decodes_until_its_end_is_in_flight(table: RunningTable) -> None:
    seated(table, 2, 5, end=8)

    decoded = 0
    while table.ready_slots().size:
        table.advance(table.ready_slots())
        decoded += 1

    assert decoded == 2  # the prompt's step delivers token 6, two more deliver 7 and 8
    assert table.in_flight(2)


def test_pages_are_needed_when_the_next_position_has_none(table: RunningTable) -> None:
    seated(table, 0, 4, end=20)
    seated(table, 1, 5, end=20)

    assert table.decode_pages_needed(table.ready_slots()) == 1


def test_running_is_oldest_first(table: RunningTable) -> None:
    seated(table, 0, 4, end=20, arrival=7)
    seated(table, 3, 4, end=20, arrival=2)

    assert [sequence.arrival for sequence in table.running()] == [2, 7]
    assert table.num_running == 2


def test_a_cleared_row_is_nobodys(table: RunningTable) -> None:
    seated(table, 0, 4, end=20)

    table.clear(0)

    assert table.num_running == 0
    assert table.ready_slots().size == 0
    table.check_integrity()


def test_integrity_names_the_row_that_is_wrong(table: RunningTable) -> None:
    seated(table, 1, 5, end=9)
    table.check_integrity()

    table.num_pages[1] = 1
    with pytest.raises(IntegrityError, match="row 1: 1 pages do not hold 5"):
        table.check_integrity()
    table.num_pages[1] = 2
    table.known[1] = 4
    with pytest.raises(IntegrityError, match="row 1"):
        table.check_integrity()
    table.known[1] = 5
    table.decoding[3] = True
    with pytest.raises(IntegrityError, match="row 3"):
        table.check_integrity()
