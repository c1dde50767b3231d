"""A cache type from outside the package: one file, registered by an entry point, chosen from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

OUTSIDE_CACHE = '''
from app.caches.radix_cache import RadixCache
from app.caches.registry import register_kv_cache
from app.config.model_config import Component


class CountingCache(RadixCache):
    """A radix cache that counts its matches."""

    matches = 0

    def match(self, key):
        CountingCache.matches += 1
        return super().match(key)


register_kv_cache("counting_cache", CountingCache, components=[frozenset({Component.FULL})])
'''

SERVE_WITH_IT = """
import numpy as np
from app.config.server_args import ServerArgs
from app.providers.testing import overridden
from app.scheduling.engine import generate_all
from app.scheduling.request import Request

args = ServerArgs(page_size=4, max_total_tokens=256, cache_type="counting_cache")
with overridden(args, fake=True) as container:
    requests = [Request(request_id=n, prompt_token_ids=np.arange(1, 20, dtype=np.int32)) for n in "ab"]
    generate_all(container.scheduler(), requests)
    container.scheduler().check_integrity()
    print(type(container.tree_cache()).__name__, container.tree_cache().matches > 0, container.cache_type().reason)
with overridden(ServerArgs(page_size=4, max_total_tokens=256), fake=True) as container:
    print(container.cache_type().name)
"""


def run(folder: Path, code: str) -> str:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{root}"}
    finished = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_an_outside_type_is_found_by_its_entry_point_and_never_a_default(tmp_path):
    (tmp_path / "counting_cache.py").write_text(OUTSIDE_CACHE)
    info = tmp_path / "counting_cache-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-cache\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        dedent("""
        [tpukv.kv_caches]
        counting_cache = counting_cache
        """)
    )
    first, second = run(tmp_path, SERVE_WITH_IT).splitlines()[-2:]
    assert first == "CountingCache True asked for by --cache-type"
    assert second == "unified_radix_cache"
