from __future__ import annotations

import numpy as np
import pytest

from app.caches.tiers.backup_pace import BackupPace

ALL, START = 1600, 200
JUDGED = 8


def note(pace: BackupPace, *, seconds: float, is_copying: bool, rows: int = 4, prompt_tokens: int = 0) -> None:
    pace.note_step(prompt_tokens=prompt_tokens, decode_rows=rows, seconds=seconds, is_copying=is_copying)


def judged(pace: BackupPace, seconds: float, times: int = 1) -> int:
    """-> the pace after so many judgements of steps alike."""
    for _ in range(times * JUDGED):
        note(pace, seconds=seconds, is_copying=True)
    return pace.bytes_a_plan


def test_it_begins_with_a_part_and_grows_as_long_as_decoding_is_no_slower() -> None:
    pace = BackupPace(ALL, 1)
    note(pace, seconds=0.010, is_copying=False)

    assert pace.take() == START
    assert judged(pace, 0.010) == 2 * START
    assert judged(pace, 0.010, times=20) == ALL


def test_slower_decoding_under_backups_halves_the_pace_and_it_grows_back() -> None:
    pace = BackupPace(ALL, 1)
    note(pace, seconds=0.010, is_copying=False)
    judged(pace, 0.010, times=7)

    assert judged(pace, 0.012) == ALL // 2
    assert judged(pace, 0.012) == ALL // 4
    assert judged(pace, 0.010, times=6) == ALL


def test_three_percent_are_tolerated() -> None:
    pace = BackupPace(ALL, 1)
    note(pace, seconds=0.0100, is_copying=False)
    assert judged(pace, 0.0102) > START
    assert judged(pace, 0.0104) == START


def test_a_slow_tail_alone_halves_the_pace_and_one_slow_step_does_not() -> None:
    for num_slow, after in ((1, 2 * START), (2, START // 2)):
        pace = BackupPace(ALL, 1)
        for _ in range(64):
            note(pace, seconds=0.010, is_copying=False)
        for step in range(JUDGED):
            note(pace, seconds=0.010 if step >= num_slow else 0.015, is_copying=True)
        assert pace.bytes_a_plan == after


def test_a_tail_that_decoding_has_by_itself_is_no_reason_to_be_slow() -> None:
    pace = BackupPace(ALL, 1)
    for step in range(64):
        note(pace, seconds=0.030 if step % 4 == 0 else 0.010, is_copying=False)
    for step in range(JUDGED):
        note(pace, seconds=0.030 if step % 4 == 0 else 0.010, is_copying=True)
    assert pace.bytes_a_plan == 2 * START


@pytest.mark.parametrize("spread", [0.05, 0.3])
def test_noise_that_both_have_does_not_stop_backups(spread: float) -> None:
    rng = np.random.default_rng(0)
    pace, paces = BackupPace(ALL, 1), []
    for step in range(4000):
        seconds = float(0.010 * np.exp(rng.normal(0, spread)))
        note(pace, seconds=seconds, is_copying=step % 32 >= 16)
        paces.append(pace.bytes_a_plan)
    assert np.mean(paces) > ALL / 8


def test_it_settles_where_decoding_is_slowed_by_as_much_as_is_tolerated() -> None:
    pace, paces = BackupPace(ALL, 1), []
    note(pace, seconds=0.010, is_copying=False)
    for _ in range(100):
        seconds = 0.010 * (1 + 0.1 * pace.bytes_a_plan / ALL)  # half the pace takes the five percent
        paces.append(judged(pace, seconds))
    assert ALL / 4 < np.mean(paces[20:]) < 3 * ALL / 4


def test_only_steps_alike_are_compared() -> None:
    pace = BackupPace(ALL, 1)
    note(pace, seconds=0.010, is_copying=False, rows=1)
    for _ in range(2 * JUDGED):
        note(pace, seconds=0.100, is_copying=True, rows=64)
        note(pace, seconds=0.100, is_copying=True, rows=1, prompt_tokens=512)
    assert pace.take() == START


def test_copying_without_end_pauses_now_and_then_to_see_how_quick_steps_are_without() -> None:
    pace = BackupPace(ALL, 1)
    for _ in range(64):
        note(pace, seconds=0.010, is_copying=True)
    assert [pace.take() for _ in range(3)] == [0, 0, START]


def test_it_never_falls_to_nothing() -> None:
    pace = BackupPace(ALL, 1)
    note(pace, seconds=0.010, is_copying=False)
    judged(pace, 1.0, times=50)
    pauses = 2
    assert sum(pace.take() for _ in range(pauses + 16)) == 16


def test_little_is_saved_up_until_it_is_worth_a_copy() -> None:
    pace = BackupPace(ALL, 10)
    note(pace, seconds=0.010, is_copying=False)
    judged(pace, 1.0, times=3)

    assert [pace.take() for _ in range(7)] == [0, 0, 0, 100, 0, 0, 0]


def test_a_plan_beside_which_nobody_decodes_may_begin_everything() -> None:
    pace = BackupPace(ALL, 10)
    note(pace, seconds=0.010, is_copying=False)
    judged(pace, 1.0, times=8)

    pace.lift()

    assert pace.take() >= ALL
    assert pace.take() == 0
