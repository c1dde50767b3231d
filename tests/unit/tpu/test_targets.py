"""TPUs by name, where there is no compiler for them."""

from __future__ import annotations

import importlib.util

import pytest

from app.errors import ConfigError
from app.tpu.targets import find_target


def test_a_chip_that_nobody_knows_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"--target='v99:2x2' .* v5e, v6e, v5p, tpu7x"):
        find_target("v99:2x2")


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is not None, reason="the compiler is installed")
def test_without_the_compiler_a_target_is_refused_with_what_to_install() -> None:
    with pytest.raises(ConfigError, match=r"--target='v5e:2x2' .* the extra `tpu`"):
        find_target("v5e:2x2")
