from __future__ import annotations

from app.caches.tiers.restore_choice import RestoreChoice


def knowing(*, restored_bytes_per_s: float, prompt_tokens_per_s: float = 1000.0, step_s: float = 0.01) -> RestoreChoice:
    choice = RestoreChoice()
    choice.begin_at(restored_bytes_per_s)
    choice.note_step(prompt_tokens=int(prompt_tokens_per_s * step_s), seconds=step_s)
    return choice


def test_before_anything_is_known_restores_are_worth_it() -> None:
    assert RestoreChoice().is_worth(num_bytes=10**12, num_tokens=1)


def test_it_begins_at_what_was_measured_before_there_were_requests() -> None:
    assert knowing(restored_bytes_per_s=1e6).is_worth(num_bytes=10**6, num_tokens=2000)
    assert not knowing(restored_bytes_per_s=1e6).is_worth(num_bytes=10**6, num_tokens=500)


def test_a_rate_that_was_wrongly_low_heals_by_one_restore_that_is_tried() -> None:
    choice = knowing(restored_bytes_per_s=1e3)
    tried = [choice.is_worth(num_bytes=10**6, num_tokens=500) for _ in range(32)]
    assert tried == [False] * 31 + [True]

    choice.note_restore(num_bytes=10**6, seconds=0.01)  # it was quick

    assert choice.is_worth(num_bytes=10**6, num_tokens=500)


def test_one_step_that_took_ten_seconds_does_not_make_restores_too_slow() -> None:
    """As one does for which programs are compiled."""
    choice = knowing(restored_bytes_per_s=1e9)
    choice.note_step(prompt_tokens=0, seconds=10.0)
    assert choice.is_worth(num_bytes=10**6, num_tokens=100)


def test_one_restore_that_took_ten_seconds_does_not_make_restores_too_slow() -> None:
    choice = knowing(restored_bytes_per_s=1e9)
    choice.note_restore(num_bytes=10**6, seconds=10.0)
    assert choice.is_worth(num_bytes=10**6, num_tokens=100)
