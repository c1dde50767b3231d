"""Run in a process of its own with several CPU devices: a golden model behind every tier, at a tensor-parallel size.

Prints JSON: for each way that a prefix came, the tiers that it came from, ids, and log-probabilities of every token.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.support.served_tiers import served_ways

if __name__ == "__main__":
    family, tp_size = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(served_ways(family, Path(folder), tp_size=int(tp_size))))
