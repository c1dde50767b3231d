"""Nodes find one another, or say why not."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

import pytest

from app.commands.nodes.meeting import meet
from app.config.server_args import ServerArgs
from app.errors import ConfigError
from tests.support.two_nodes import free_port

VERSION = "1.0"


def node(rank: int, port: int, **fields: Any) -> ServerArgs:
    defaults = {"nnodes": 2, "tp_size": 2, "max_total_tokens": 64, "dist_timeout": 20}
    return ServerArgs(**{**defaults, "node_rank": rank, "dist_init_addr": f"127.0.0.1:{port}", **fields})


def meeting(*given: tuple[ServerArgs, str]) -> list[Any]:
    """What each node finds when all meet at the same time: its connections, or the error."""
    found: list[Any] = [None] * len(given)

    def run(place: int) -> None:
        try:
            found[place] = meet(*given[place])
        except ConfigError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def close(*found: dict[int, socket.socket]) -> None:
    for links in found:
        for link in links.values():
            link.close()


def test_every_follower_is_connected_to_node_0_under_its_rank() -> None:
    port = free_port()
    nodes = [(node(rank, port, nnodes=3, tp_size=3), VERSION) for rank in (2, 0, 1)]

    second, leader, first = meeting(*nodes)

    assert (set(leader), set(first), set(second)) == ({1, 2}, {0}, {0})
    leader[2].sendall(b"x")
    assert second[0].recv(1) == b"x"
    close(leader, first, second)


def test_settings_that_a_node_may_have_of_its_own_do_not_keep_it_out() -> None:
    port = free_port()

    found = meeting(
        (node(0, port, log_level="debug", model_path="/a"), VERSION), (node(1, port, model_path="/b"), VERSION)
    )

    close(*found)


@pytest.mark.parametrize(
    ("fields", "version", "words"),
    [
        ({"page_size": 8}, VERSION, "all nodes get the same --page-size; node 0 has 16 and node 1 8"),
        ({"random_seed": 3}, VERSION, "all nodes get the same --random-seed; node 0 has 0 and node 1 3"),
        ({}, "2.0", "all nodes run one version; node 0 runs 1.0 and node 1 2.0"),
    ],
)
def test_a_node_that_was_told_other_things_is_refused_on_both_sides(
    fields: dict[str, Any], version: str, words: str
) -> None:
    port = free_port()

    leader, follower = meeting((node(0, port), VERSION), (node(1, port, **fields), version))

    assert isinstance(leader, ConfigError)
    assert isinstance(follower, ConfigError)
    assert words in str(leader)
    assert words in str(follower)


def test_a_rank_that_comes_twice_is_refused() -> None:
    port = free_port()
    args = {"nnodes": 3, "tp_size": 3}

    leader, *followers = meeting(*((node(rank, port, **args), VERSION) for rank in (0, 1, 1)))

    assert "every node has a --node-rank of its own; 1 came twice" in str(leader)
    assert sum("came twice" in str(follower) for follower in followers) == 1
    close(*(follower for follower in followers if isinstance(follower, dict)))


def test_node_0_names_those_that_did_not_come() -> None:
    [alone] = meeting((node(0, free_port(), nnodes=3, tp_size=3, dist_timeout=1), VERSION))

    assert str(alone) == "--nnodes=3 is not allowed: nodes that all start within 1 s; not seen: node 1, 2"


def test_a_follower_that_finds_nobody_names_the_address() -> None:
    port = free_port()

    [alone] = meeting((node(1, port, dist_timeout=1), VERSION))

    assert str(alone).startswith(f"--dist-init-addr='127.0.0.1:{port}' is not allowed: where node 0 answers within 1 s")


def test_an_address_in_use_is_refused_by_its_flag() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        [alone] = meeting((node(0, port), VERSION))

    assert str(alone).startswith(f"--dist-init-addr='127.0.0.1:{port}' is not allowed: an address of node 0 whose port")


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b""])
def test_strangers_at_the_port_are_sent_away_and_the_node_still_gets_in(said: bytes) -> None:
    # given: somebody else is there first
    port = free_port()
    leader: list[Any] = []
    thread = threading.Thread(target=lambda: leader.append(meet(node(0, port), VERSION)))
    thread.start()
    stranger = _connected(port)
    with contextlib.suppress(OSError):  # sent away meanwhile
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)

    # when
    follower = meet(node(1, port), VERSION)
    thread.join(60)

    # then
    assert set(leader[0]) == {1}
    stranger.close()
    close(leader[0], follower)


def _connected(port: int) -> socket.socket:
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            continue
