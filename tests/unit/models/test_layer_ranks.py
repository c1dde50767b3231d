"""Layers cut over 2 and 4 CPU devices give what they give on one. float32."""

from __future__ import annotations

from tests.support.forced_devices import run_on_eight_devices


def test_the_sum_over_ranks_and_the_states_do_not_depend_on_the_number_of_ranks() -> None:
    found = run_on_eight_devices("tests.support.layer_ranks_check")

    assert len(found) == 8
    assert {name: difference for name, difference in found.items() if not difference <= 5e-6} == {}
