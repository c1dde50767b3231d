"""What is free when the weights are loaded, and the refusal of a pool that does not fit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from dependency_injector import providers
from pytest_mock import MockerFixture

from app.config.server_args import ServerArgs
from app.errors import ConfigError
from app.providers import free_memory, hybrid
from app.providers.step_memory import penalty_table_bytes, step_bytes
from app.providers.testing import overridden
from app.tpu.cpu_fake import fake_model_config
from app.tpu.mesh import make_mesh
from tests.support.engine import server_args
from tests.support.tiny_llama import files_of, tiny_llama

MODEL = tiny_llama()


def opened_with(free_bytes: int, **fields: Any) -> None:
    """Open an engine on a device that says that so many bytes are free."""
    free = {"free_bytes": lambda _: providers.Object(lambda: free_bytes)}
    with overridden(server_args(**fields), **files_of(MODEL), **free) as container:
        container.runtime()


def needed_bytes(**fields: Any) -> int:
    with overridden(server_args(**fields), **files_of(MODEL)) as container:
        spec = container.pool_spec()
        return (spec.num_pages + 1) * spec.page_bytes + container.step_bytes()


def test_a_pool_that_fits_what_is_free_is_allocated() -> None:
    opened_with(needed_bytes())


def test_a_pool_that_was_asked_for_and_does_not_fit_is_refused_with_the_numbers() -> None:
    page_bytes = 2 * MODEL.num_layers * 4 * MODEL.num_kv_heads * MODEL.head_dim * 4

    with pytest.raises(ConfigError, match=r"--max-total-tokens=256 .*at most 244, or a lower --mem-fraction-static"):
        opened_with(needed_bytes() - 3 * page_bytes + 1)
    with pytest.raises(ConfigError, match=r"0\.00 GB are free.*at most 0,"):
        opened_with(0)


def test_a_pool_of_the_default_size_that_does_not_fit_names_the_part_of_the_memory() -> None:
    with pytest.raises(ConfigError, match=r"--mem-fraction-static=0\.7 is not allowed: less: with the weights loaded"):
        opened_with(100, max_total_tokens=None)


RECURRENT = fake_model_config(recurrent=True)


def test_more_snapshots_than_could_be_in_use_are_refused_before_anything_is_built() -> None:
    """64 pages, and up to two snapshots for each of 4 requests that no page in the tree has yet."""
    with overridden(server_args(max_recurrent_snapshots=72), fake=True, model=RECURRENT) as container:
        assert container.state_allocator().capacity == 72
    for asked in (73, 2**31 - 1):
        with overridden(server_args(max_recurrent_snapshots=asked), fake=True, model=RECURRENT) as container:
            with pytest.raises(ConfigError, match=rf"--max-recurrent-snapshots={asked} is not allowed: at most 72:"):
                container.state_allocator()


def test_snapshots_that_were_asked_for_and_do_not_fit_are_refused_with_how_many_would() -> None:
    args = server_args(max_recurrent_snapshots=50)
    with overridden(args, fake=True, model=RECURRENT) as container:
        states = container.state_spec()
        needed = hybrid.pool_bytes(*container.specs()) + container.step_bytes()

    def opened_over(free_bytes: int) -> None:
        free = {"free_bytes": lambda _: providers.Object(lambda: free_bytes)}
        with overridden(args, fake=True, model=RECURRENT, **free) as container:
            container.runtime()

    opened_over(needed)
    with pytest.raises(ConfigError, match=r"--max-recurrent-snapshots=50 is not allowed: at most 46, of "):
        opened_over(needed - 3 * states.held_bytes - 1)
    with pytest.raises(ConfigError, match="--max-total-tokens=256 is not allowed"):
        opened_over(needed - 50 * states.held_bytes)


def test_the_weights_are_loaded_and_no_pool_is_allocated_when_it_is_refused() -> None:
    loaded: list[bool] = []

    def free() -> int:
        loaded.append(container.model_runner()._runner._weights is not None)
        return 0

    with overridden(server_args(), **files_of(MODEL), free_bytes=lambda _: providers.Object(free)) as container:
        with pytest.raises(ConfigError):
            container.runtime()
        assert loaded == [True]
        assert container.device_pool()._buffers is None


class Device:
    """A device that tells of its memory as a TPU does."""

    platform, process_index = "tpu", 0

    def __init__(self, limit: int, used: int) -> None:
        self._stats = {"bytes_limit": limit, "bytes_in_use": used, "peak_bytes_in_use": limit}

    def memory_stats(self) -> dict[str, int]:
        return self._stats


def test_on_tpu_the_fullest_device_counts_for_all(mocker: MockerFixture) -> None:
    mesh = mocker.Mock(size=2)
    mesh.devices.flat = [Device(1000, 100), Device(1000, 400)]

    assert free_memory.free_memory(mesh)() == 2 * 600


def test_on_cpu_it_is_the_least_of_machine_and_cgroup(tmp_path: Path, mocker: MockerFixture) -> None:
    cgroup, meminfo = tmp_path / "cgroup", tmp_path / "meminfo"
    mocker.patch.object(free_memory, "_CGROUP", cgroup)
    mocker.patch.object(free_memory, "_MEMINFO", meminfo)
    mocker.patch.object(free_memory, "host_memory_bytes", return_value=10_000_000)
    read = free_memory.free_memory(make_mesh(1, "cpu"))

    assert read() == 10_000_000  # nothing else is known
    meminfo.write_text("MemTotal:  9000 kB\nMemAvailable:  8000 kB\nHugePages_Total:  0\n")
    assert read() == 8000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.current").write_text("600000\n")
    (cgroup / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    (cgroup / "memory.max").write_text("max\n")
    assert read() == 8000 * 1024
    (cgroup / "memory.max").write_text("1000000\n")
    assert read() == 450_000


def test_a_step_grows_with_rows_vocabulary_and_chunk() -> None:
    def of(**fields: Any) -> int:
        args = ServerArgs(**fields)
        with overridden(args, **files_of(MODEL)) as container:
            return step_bytes(args, container.model_config(), container.scheduler_limits(), "float32")

    assert of(max_running_requests=64) > of(max_running_requests=32) > of()
    assert of(chunked_prefill_size=2048) > of()
    assert penalty_table_bytes(ServerArgs(max_running_requests=3), MODEL) == 3 * MODEL.vocab_size * (4 + 1 + 4)
