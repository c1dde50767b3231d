from __future__ import annotations

from app.caches.tiers.backup_pace import BackupPace


def note(pace: BackupPace, *, seconds: float, is_copying: bool, rows: int = 4, prompt_tokens: int = 0) -> None:
    pace.note_step(prompt_tokens=prompt_tokens, decode_rows=rows, seconds=seconds, is_copying=is_copying)


def test_slower_decoding_under_backups_halves_the_pace_and_it_grows_back() -> None:
    pace = BackupPace(1600)
    note(pace, seconds=0.010, is_copying=False)
    note(pace, seconds=0.012, is_copying=True)
    assert pace.take() == 800

    for _ in range(8):
        note(pace, seconds=0.010, is_copying=True)

    assert pace.take() == 1600


def test_five_percent_are_tolerated() -> None:
    pace = BackupPace(1600)
    note(pace, seconds=0.0100, is_copying=False)
    note(pace, seconds=0.0104, is_copying=True)
    assert pace.take() == 1600


def test_only_steps_alike_are_compared() -> None:
    pace = BackupPace(1600)
    note(pace, seconds=0.010, is_copying=False, rows=1)
    note(pace, seconds=0.100, is_copying=True, rows=64)
    note(pace, seconds=0.100, is_copying=True, rows=1, prompt_tokens=512)
    assert pace.take() == 1600


def test_copying_without_end_pauses_now_and_then_to_see_how_quick_steps_are_without() -> None:
    pace = BackupPace(1600)
    for _ in range(64):
        note(pace, seconds=0.010, is_copying=True)
    assert [pace.take() for _ in range(3)] == [0, 0, 1600]


def test_it_never_falls_to_nothing() -> None:
    pace = BackupPace(1600)
    note(pace, seconds=0.010, is_copying=False)
    for _ in range(50):
        note(pace, seconds=1.0, is_copying=True)
    assert pace.take() >= 1
