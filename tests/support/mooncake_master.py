"""A real master of Mooncake Store, where its package is installed."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

LIMIT_S = 30


def why_not() -> str | None:
    """Why Mooncake cannot be run here; None where it can."""
    if find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    try:
        from mooncake.store import MooncakeDistributedStore  # noqa: F401
    except ImportError as error:
        return f"mooncake cannot be loaded: {error}"
    return None


@contextmanager
def mooncake_master(log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """-> its HOST:PORT, and the process."""
    package = find_spec("mooncake")
    assert package is not None
    assert package.submodule_search_locations
    program = Path(package.submodule_search_locations[0]) / "mooncake_master"
    port = _free_port()
    arguments = [f"--rpc_port={port}", f"--metrics_port={_free_port()}", "--enable_http_metadata_server=false"]
    with log.open("wb") as output:
        process = subprocess.Popen([str(program), *arguments], stdout=output, stderr=output)
    try:
        _wait_for(port, process, log)
        yield f"127.0.0.1:{port}", process
    finally:
        process.kill()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    give_up = time.monotonic() + LIMIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if process.poll() is not None or time.monotonic() > give_up:
                raise RuntimeError(f"the master did not start: {log.read_text(errors='replace')[-2000:]}") from None
            time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])
