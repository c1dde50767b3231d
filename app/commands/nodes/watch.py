"""The nodes of one engine watch one another over the connections that they met on. In both directions:

    BEAT   once a second, for as long as the node lives
    BYE    once, before a node leaves in order; a connection that ends without it is that of a node that died

jax.distributed watches as well, but ends the process without a word of ours, or late, or, where a node waits inside a
step for one that is gone, not at all.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence

SILENCE_S = 15.0  # a node that was not heard for so long counts as gone
LEAVE_S = 10.0  # that a node which is done waits for the others
_BEAT_S = 1.0
_BEAT, _BYE = b".", b"!"


class NodeWatch:
    """A thread that tells, once, when another node dies or falls silent. Owns the connections that `meet` made.

    A node that stands still as a whole (suspended, or holding the interpreter so long) counts as gone as well.
    """

    def __init__(
        self, links: Mapping[int, socket.socket], on_loss: Callable[[str], None], silence_s: float = SILENCE_S
    ) -> None:
        """`on_loss` gets a sentence about the node that is gone, on the watching thread."""
        self._links = dict(links)
        self._on_loss = on_loss
        self._silence_s = silence_s
        self._heard = dict.fromkeys(links, time.monotonic())  # connections that are open: when they last spoke
        self._left: set[int] = set()  # ranks that said BYE
        self._all_left = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def start(self) -> None:
        for link in self._links.values():
            link.settimeout(_BEAT_S)
        self._thread.start()

    def leave(self) -> None:
        """Say that this node is done, and wait LEAVE_S at most for all others to say so: then nobody needs it."""
        self._tell(_BYE)
        self._all_left.wait(LEAVE_S)

    def wait_until_closed(self) -> None:
        """Wait LEAVE_S at most until the others have closed their connections. After `leave`."""
        self._thread.join(LEAVE_S)

    def close(self) -> None:
        """Stop watching and close the connections. Whoever still runs is told so by that, unless this node has left."""
        self._stopping.set()
        self._thread.join()
        for link in self._links.values():
            link.close()

    def _run(self) -> None:
        next_beat = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for rank, link in self._links.items():
                selector.register(link, selectors.EVENT_READ, rank)
            while self._heard and not self._stopping.is_set():
                ready = [key.data for key, _ in selector.select(_BEAT_S / 4)]
                closed = [rank for rank in ready if not self._listen_to(rank)]
                for rank in closed:
                    selector.unregister(self._links[rank])
                    del self._heard[rank]
                loss = self._loss(closed)
                if loss and not self._stopping.is_set():
                    self._on_loss(loss)
                    return
                if time.monotonic() >= next_beat:
                    self._tell(_BEAT)
                    next_beat = time.monotonic() + _BEAT_S

    def _listen_to(self, rank: int) -> bool:
        """Take in what a node said. -> whether its connection is still open."""
        try:
            said = self._links[rank].recv(4096)
        except OSError:
            said = b""
        if _BYE in said:
            self._left.add(rank)
            if len(self._left) == len(self._links):
                self._all_left.set()
        self._heard[rank] = time.monotonic()
        return bool(said)

    def _loss(self, closed: Sequence[int]) -> str:
        """What there is to tell; empty if all is well."""
        for rank in closed:
            if rank not in self._left:
                return f"node {rank} is gone: its connection ended"
        now = time.monotonic()
        for rank, heard in self._heard.items():
            if now - heard > self._silence_s:
                return f"node {rank} is gone: nothing was heard of it for {self._silence_s:.0f} s"
        return ""

    def _tell(self, word: bytes) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):  # reading from it finds that out, too
                link.send(word)
