"""What a draft asks for."""

from __future__ import annotations

import numpy as np
import pytest

from app.core.sampling import SamplingParams
from app.scheduling.draft import Chunk, Draft
from app.scheduling.request import Request, Sequence


def chunk(snapshot: bool) -> Chunk:
    request = Request(request_id="r", prompt_token_ids=np.arange(4, dtype=np.int32))
    return Chunk(
        sequence=Sequence(request, SamplingParams(seed=0), 0), start=0, length=4, samples=False, snapshot=snapshot
    )


@pytest.mark.parametrize(
    ("most", "rows"),
    [
        (9, [True, False, True, True, False, True]),
        (3, [True, False, True, True, False, False]),
        (1, [True, False, False, False, False, False]),
        (0, [False] * 6),
    ],
)
def test_no_more_snapshots_are_asked_for_than_restores_leave(most: int, rows: list[bool]) -> None:
    draft = Draft(
        decode_slots=np.arange(3, dtype=np.int32),
        decode_snapshots=np.array([True, False, True]),
        pages=0,
        budget=0,
        max_snapshots=most,
        chunks=[chunk(True), chunk(False), chunk(True)],
    )

    assert draft.snapshots().tolist() == rows
