"""Settings of an engine on several nodes: what belongs together, and with which words it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from app.config.server_args import ServerArgs
from app.errors import CacheTypeConflictError, ConfigError

GOOD: dict[str, Any] = {"nnodes": 2, "tp_size": 4, "max_total_tokens": 64, "dist_init_addr": "10.0.0.1:5000"}


@pytest.mark.parametrize("changes", [{}, {"node_rank": 1}, {"nnodes": 4}, {"dist_init_addr": "[::1]:65534"}])
def test_nodes_that_fit_together_are_accepted(changes: dict[str, Any]) -> None:
    args = ServerArgs(**{**GOOD, **changes})

    assert {name: getattr(args, name) for name in changes} == changes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"node_rank": 2}, "--node-rank=2 cannot be combined with --nnodes=2: nodes count from 0 to 1"),
        ({"dist_init_addr": None}, "--dist-init-addr=None cannot be combined with --nnodes=2"),
        ({"nnodes": 1}, "--dist-init-addr='10.0.0.1:5000' cannot be combined with --nnodes=1"),
        ({"tp_size": 3}, "--tp-size=3 cannot be combined with --nnodes=2"),
        ({"max_total_tokens": None}, "--max-total-tokens=None cannot be combined with --nnodes=2"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_by_both_names(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CacheTypeConflictError) as caught:
        ServerArgs(**{**GOOD, **changes})

    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("address", ["", "host", "host:", ":5000", "host:0", "host:65535", "host:x", "host:-1", 5000])
def test_an_address_that_is_none_is_refused(address: object) -> None:
    with pytest.raises(ConfigError, match=r"^--dist-init-addr=.* is not allowed: HOST:PORT, with a port from 1 to"):
        ServerArgs(**{**GOOD, "dist_init_addr": address})


@pytest.mark.parametrize(("field", "value"), [("nnodes", 0), ("nnodes", True), ("node_rank", -1), ("dist_timeout", 0)])
def test_numbers_out_of_range_are_refused_by_their_flag(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^--{field.replace('_', '-')}={value!r} is not allowed: a whole number"):
        ServerArgs(**{**GOOD, field: value})
