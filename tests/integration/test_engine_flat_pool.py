"""The engine as TPU runs it, all layers over one flat pool, gives the tokens that the CPU's driver gives.

On CPU devices. The ragged kernel runs on TPU alone: what it is documented to compute stands for it here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow  # six engines are compiled
def test_every_attention_and_number_of_devices_gives_the_same_tokens() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}

    finished = subprocess.run(
        [sys.executable, "-m", "tests.support.flat_engines"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    assert finished.returncode == 0, finished.stderr
    answers = json.loads(finished.stdout)
    assert len(answers) == 6
    assert all(len(tokens) == 12 for tokens in answers["rows"])
    for name, tokens in answers.items():
        assert tokens == answers["rows"], name
