"""On several devices too, nothing is compiled while requests run once everything was."""

from __future__ import annotations

import pytest

from tests.support.forced_devices import run_on_eight_devices


@pytest.mark.slow  # compiles the sampler 36 times
def test_after_everything_is_compiled_serving_compiles_nothing_with_either_driver() -> None:
    assert run_on_eight_devices("tests.support.warm_engines") == {"rows": [], "gather": []}
