"""The control plane runs where neither jax nor the runtime side can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTROL = ("config", "core", "caches", "scheduling", "scheduler_adapter.py", "runtime/interface.py")

IMPORT_WITH_JAX_BLOCKED = """
import importlib, sys

BLOCKED = (
    "jax", "jaxlib", "app.tpu", "app.memory", "app.models", "app.hicache", "app.runtime.local", "app.runtime.dispatch",
)


class Fence:
    def find_spec(self, name, path=None, target=None):
        if any(name == blocked or name.startswith(blocked + ".") for blocked in BLOCKED):
            raise ImportError(f"{name} is behind the fence")
        return None


sys.meta_path.insert(0, Fence())
for name in sys.argv[1:]:
    importlib.import_module(name)
print(len(sys.argv) - 1, "modules")
"""


def control_modules() -> list[str]:
    paths = [path for part in CONTROL for path in _sources(ROOT / "app" / part)]
    return [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths if path.name != "__init__.py"]


def _sources(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def run(*modules: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT_WITH_JAX_BLOCKED, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_control_modules_import_with_jax_and_the_runtime_side_blocked():
    modules = control_modules()
    finished = run(*modules)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.split() == [str(len(modules)), "modules"]
    assert len(modules) > 25


def test_the_fence_of_this_test_holds():
    finished = run("app.containers")
    assert finished.returncode != 0
    assert "is behind the fence" in finished.stderr


def test_package_files_hold_no_logic():
    for path in (ROOT / "app").rglob("__init__.py"):
        assert not path.read_text().strip(), f"{path} has code: importing a package must import nothing"
