"""The mesh of one process, and what is refused. Of several: tests/integration/test_two_processes.py."""

from __future__ import annotations

import pytest

from app.errors import ConfigError
from app.tpu.mesh import make_mesh, num_nodes_of, tp_rank_of


def test_one_process_drives_the_whole_tensor_axis() -> None:
    mesh = make_mesh(1, "cpu")

    assert dict(mesh.shape) == {"data": 1, "tensor": 1}
    assert (num_nodes_of(mesh), tp_rank_of(mesh)) == (1, 0)


def test_a_process_that_was_not_joined_is_no_node() -> None:
    with pytest.raises(ConfigError, match=r"^--nnodes=2 is not allowed: 1, the processes that were joined"):
        make_mesh(2, "cpu", num_nodes=2)


@pytest.mark.parametrize("tp_size", [0, 4096])
def test_more_or_fewer_devices_than_there_are_is_refused(tp_size: int) -> None:
    with pytest.raises(ConfigError, match=rf"^--tp-size={tp_size} is not allowed: 1 to \d+, the cpu devices there are"):
        make_mesh(tp_size, "cpu")
