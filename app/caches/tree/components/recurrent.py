"""The recurrent component: snapshots of a state that has consumed exactly the tokens up to a node's end.

Such a state cannot be cut back, so a prefix can be used only where a snapshot was taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from app.caches.base import InsertResult, MatchResult
from app.caches.tree.components.base import Split, TreeComponent
from app.caches.tree.node import TreeNode
from app.config.model_config import Component

_NOWHERE = -1


class StateComponent(TreeComponent):
    """Parts are single snapshots."""

    component = Component.RECURRENT
    kind = "snapshot"

    def reach(self, node: TreeNode) -> int:
        return node.end - 1

    def begin(self, node: TreeNode) -> int:
        return node.end - 1

    def longest(self, node: TreeNode, present: int, end: int) -> int:
        return self.longest_with(_NOWHERE, node, present, end)

    def longest_with(self, given_at: int, node: TreeNode, present: int, end: int) -> int:
        """As `longest`, if there were a snapshot of the first `given_at` tokens."""
        if end == given_at:
            return end
        end = min(end, present)
        at: TreeNode | None = node
        while at is not None and end > 0:
            if end == given_at or (end == at.end and at in self.parts):  # of a part of a node there is none
                return end
            end = at.start
            at = at.parent
        return 0

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """The lower one still ends where it ended and keeps the snapshot; there is none of the upper one's end."""

    def named(self, node: TreeNode) -> dict[str, Any]:
        return {"state": self.state_of(node)}

    def holds(self, found: MatchResult | InsertResult) -> bool:
        return found.state != 0 and self.state_of(found.node) == found.state

    def state_of(self, node: TreeNode) -> int:
        """The snapshot of the end of `node`; 0 if there is none."""
        part = self.parts.get(node)
        return 0 if part is None else int(part.ids[0])

    def misplaced(self) -> Iterator[str]:
        for node, part in self.parts.items():
            if part.ids.size != 1:
                yield f"a node that ends after {node.end} tokens has {part.ids.size} snapshots"

    def offer(self, state: int, num_tokens: int) -> StateOffer:
        """`state`: the caller's snapshot of exactly `num_tokens` tokens, or 0."""
        return StateOffer(self, state, num_tokens)


class StateOffer:
    """The snapshot that an insert brings, if it brings one."""

    __slots__ = ("_adopted", "_component", "_num_tokens", "_state", "_wanted")

    def __init__(self, component: StateComponent, state: int, num_tokens: int) -> None:
        self._component = component
        self._state = state
        self._num_tokens = num_tokens
        self._adopted = False
        self._wanted = np.empty(0, np.intp)  # what `refuse` found to be adoptable

    def longest(self, node: TreeNode, present: int, end: int) -> int:
        return self._component.longest_with(self._num_tokens if self._state else _NOWHERE, node, present, end)

    def refuse(self, node: TreeNode, present: int, count: int) -> None:
        if self._state:
            self._wanted = self._component.owned.adoptable(np.array([self._state], np.int32))

    def front(self, first: int, end: int) -> int:
        return first

    def adopt(self, node: TreeNode, split: Split) -> None:
        if self._state and node.end == self._num_tokens and node not in self._component.parts:
            self._component.owned.adopt(self._wanted)
            self._component.give(node, np.array([self._state], np.int32))
            self._adopted = True

    def named(self, node: TreeNode, first: int) -> dict[str, Any]:
        return {"state": self._component.state_of(node), "state_adopted": self._adopted}
