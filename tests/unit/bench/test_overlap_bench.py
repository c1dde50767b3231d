"""The overlap bench on a fake model: what it tells, and that a tier which is broken shows."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import pytest

from app.bench.overlap import control, first_token
from app.bench.overlap.decoding import DecodeLoad
from app.bench.overlap.first_token import PrefixLengths
from app.bench.overlap.plain_copies import PlainCopies
from app.bench.overlap.recording import Event, hidden_share, idle_share, merged
from app.bench.overlap.run import OverlapLoad, run_overlap_bench
from app.bench.overlap.table import TARGETS, format_overlap_bench
from app.bench.overlap.timeline import draw_timeline
from app.caches.tiers.restore_choice import RestoreChoice
from app.config.server_args import ServerArgs
from app.tpu.cpu_fake import fake_model_config
from app.tpu.tier_copies import DeviceCopies

LOAD = OverlapLoad(
    lengths=PrefixLengths(prefix=64, suffix=5),
    decodes=DecodeLoad(rows=2, context=8, prefixes=2, prefix_tokens=64, windows=3, window_steps=4),
    control=control.ControlLoad(conversations=3, turns=2, turn_tokens=16, outputs=4, running=2, rounds=1),
    rounds=1,
    pool_tokens=1024,
)
ARGS = ServerArgs(page_size=4, context_length=512, chunked_prefill_size=16)


@pytest.fixture(autouse=True)
def _always_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake model computes a prompt quicker than anybody could bring it back."""
    monkeypatch.setattr(RestoreChoice, "is_worth", lambda *_, **__: True)


class BrokenCopies(DeviceCopies):
    """Nothing reaches the host."""

    def to_host(self, contents: Any) -> NoReturn:
        raise RuntimeError("no copies today")


def measured(**how: Any) -> tuple[dict[str, Any], str]:
    model = fake_model_config(context_length=512)
    return run_overlap_bench(ARGS, LOAD, fake=True, model=model, **how)


def test_each_figure_is_there_with_its_target() -> None:
    # when
    result, timeline = measured()

    # then
    assert json.loads(json.dumps(result)) == result
    assert all(target.key in result for target in TARGETS)
    assert 0 <= result["restore_hidden_share"] <= 1
    assert 0 <= result["idle_share"] <= 1
    assert min(result["itl_floor_p50"], result["itl_floor_p99"]) > 0
    assert 0 <= result["scheduler_cpu_share"] <= 1
    assert (result["hit_share"]["l1"], result["hit_share"]["l2"]) == (1.0, 1.0)
    assert 0 < result["hit_share"]["l3"] <= 1  # what was stored when the device and the host were emptied
    assert result["restored_share"] == 1.0
    assert result["transfer_over_device_put"] > 0
    assert set(result["us_a_step"]) == set(control.ARMS)
    assert "first token, host hit" in format_overlap_bench(result)
    assert all(f">{lane}</text>" in timeline for lane in ("compute", "to device", "to host", "storage"))


def test_the_floor_is_copied_in_whole_pages_and_no_byte_is_forgotten() -> None:
    plain = PlainCopies(page_bytes=10)
    for _ in range(3):
        plain.begin(15)
    plain.close()

    assert (plain._num_bytes, plain._num_pages) == (45, 4)
    assert [int(each) for each in plain._host[:5, 0]] == [0, 0, 0, 0, 2]


def test_a_tier_that_holds_nothing_is_told_as_misses() -> None:
    # when
    result, _ = measured(copies=BrokenCopies)

    # then
    assert result["hit_share"] == {"l1": 1.0, "l2": 0.0, "l3": 0.0}
    assert result["restored_share"] == 0.0
    assert result["restore_hidden_share"] is None
    assert result["transfer_over_device_put"] is None
    lines = format_overlap_bench(result).splitlines()
    assert [line for line in lines if "restore time behind steps" in line and line.endswith("missed")]


def copy(begin: float, end: float) -> Event:
    return Event("to device", begin, end, num_bytes=10)


def step(begin: float, end: float) -> Event:
    return Event("compute", begin, end, rows=1)


@pytest.mark.parametrize(
    ("copies", "share"),
    [
        ([copy(1, 2)], 1.0),
        ([copy(3, 5)], 0.5),  # the second half of it
        ([copy(3, 5), copy(3, 5)], 0.5),  # at the same time: it counts once
        ([copy(3, 4)], 0.0),
        ([], None),
    ],
)
def test_what_is_hidden_is_what_lies_within_steps(copies: list[Event], share: float | None) -> None:
    steps = [step(0, 2), step(1, 3), step(4, 6)]

    assert hidden_share(copies, steps) == share
    assert merged(steps) == [(0, 3), (4, 6)]


def test_what_is_idle_is_what_no_step_covers() -> None:
    assert idle_share([step(0, 1), step(2, 3), step(3, 4)]) == pytest.approx(0.25)
    assert idle_share([]) is None


def test_a_copy_is_compared_by_its_time_out_and_in() -> None:
    seconds = {"num_bytes": 100.0, "tier_out_s": 1.0, "tier_in_s": 3.0, "put_out_s": 1.0, "put_in_s": 1.0}

    figures = first_token.copy_figures({**seconds, "pages_out_s": 2.0, "pages_in_s": 2.0})

    assert figures["transfer_over_device_put"] == 0.5
    assert figures["transfer_over_put_of_pages"] == 1.0


def test_a_timeline_has_a_bar_for_each_event() -> None:
    drawn = draw_timeline([step(0, 1), copy(0.5, 1.5)])

    assert drawn.count("<title>") == 2
    assert "1 rows, 1000.0 ms" in drawn
    assert draw_timeline([]).startswith("<svg")
