"""Nodes notice that another one is gone, and do not mistake one that is done for it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from app.commands.nodes.watch import NodeWatch

LIMIT_S = 30


class Told(queue.SimpleQueue[str]):
    """What a watch told, in order."""

    def first(self) -> str:
        return self.get(timeout=LIMIT_S)


@contextmanager
def watched(silence_s: float = LIMIT_S) -> Iterator[tuple[NodeWatch, socket.socket, Told]]:
    """A watch over node 1, the other end of whose connection is the test's."""
    ours, theirs = socket.socketpair()
    told = Told()
    watch = NodeWatch({1: ours}, told.put, silence_s)
    watch.start()
    try:
        yield watch, theirs, told
    finally:
        watch.close()
        theirs.close()


def test_a_connection_that_ends_without_a_word_is_a_node_that_died() -> None:
    with watched() as (_, theirs, told):
        theirs.close()

        assert told.first() == "node 1 is gone: its connection ended"


def test_a_node_that_says_nothing_for_too_long_is_gone() -> None:
    with watched(silence_s=1) as (_, _theirs, told):
        assert told.first() == "node 1 is gone: nothing was heard of it for 1 s"


def test_a_living_node_is_heard_again_and_again() -> None:
    with watched() as (_, theirs, _told):
        theirs.settimeout(LIMIT_S)

        assert [theirs.recv(1) for _ in range(3)] == [b"."] * 3


def test_a_node_that_took_its_leave_is_not_missed() -> None:
    with watched() as (watch, theirs, told):
        theirs.sendall(b"!")
        watch.leave()
        theirs.close()
        watch.wait_until_closed()

    assert told.empty()


def test_two_watches_part_without_missing_each_other() -> None:
    # given
    first_end, second_end = socket.socketpair()
    told = Told()
    leader, follower = NodeWatch({1: first_end}, told.put), NodeWatch({0: second_end}, told.put)
    leader.start()
    follower.start()

    # when
    follower_left = _in_background(follower.leave)
    leader.leave()
    follower_left.get(timeout=LIMIT_S)
    follower.close()
    leader.wait_until_closed()
    leader.close()

    # then
    assert told.empty()


def test_closing_without_leaving_tells_the_other_side() -> None:
    first_end, second_end = socket.socketpair()
    told, own = Told(), Told()
    watching, failing = NodeWatch({1: first_end}, told.put), NodeWatch({0: second_end}, own.put)
    watching.start()
    failing.start()

    failing.close()

    assert told.first() == "node 1 is gone: its connection ended"
    assert own.empty()
    watching.close()


def test_closing_twice_is_closing_once() -> None:
    with watched() as (watch, _theirs, told):
        watch.close()
        watch.close()

    assert told.empty()


def _in_background(work: Callable[[], None]) -> queue.SimpleQueue[str]:
    done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run() -> None:
        work()
        done.put("done")

    threading.Thread(target=run).start()
    return done
