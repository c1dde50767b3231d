"""The list model of a prefix cache with window pages and recurrent states: slow and plain, by looking at every page."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.caches.tree.policies.unused_first import SHARE
from app.core.keys import Namespace
from tests.support.tree_model import ListModel, ListNode, Page

Path = tuple[Page, ...]


@dataclass
class ModelLock:
    """window_from: the first page index whose window page it keeps; None without, or once that was given up."""

    namespace: Namespace
    path: Path
    window_from: int | None


@dataclass(eq=False)
class Outcome:
    """What an insert did: the cache's ids for the published pages (0 for none), and its snapshot."""

    pages: list[int]
    window: list[int]
    state: int
    state_adopted: bool


@dataclass
class ComponentModel(ListModel):
    """window: W in tokens, or None without that component. states: whether there is the recurrent one.

    windows, snapshots: what each node has; absent where it has none.
    windows_oldest_first, snapshots_oldest_first: the nodes whose part is unlocked, in order of eviction.
    unused_windows: those whose window pages no prefix has needed yet, in the order in which they came.
    component_locks: by receipt number, beside `locks`.
    """

    window: int | None = None
    has_states: bool = False
    windows: dict[ListNode, list[int]] = field(default_factory=dict)
    snapshots: dict[ListNode, int] = field(default_factory=dict)
    windows_oldest_first: list[ListNode] = field(default_factory=list)
    snapshots_oldest_first: list[ListNode] = field(default_factory=list)
    unused_windows: list[ListNode] = field(default_factory=list)
    component_locks: dict[int, ModelLock] = field(default_factory=dict)

    # -- what a match may use

    def present(self, namespace: Namespace, path: Path) -> int:
        """The number of leading pages that have full pages, usable or not."""
        return ListModel.probe(self, namespace, path)

    def usable(self, namespace: Namespace, path: Path, given_from: int, state: int) -> int:
        """The longest prefix of `path`, in pages, that could be matched if what is given were there.

        given_from: window pages from that index on. state: a snapshot of the whole path, or 0.
        """
        for count in range(len(path), 0, -1):
            windows = (i >= given_from or self._window_page(namespace, path, i) for i in self._needed(count))
            snapshot = self.state_at(namespace, path[:count]) or (state and count == len(path))
            if all(windows) and (snapshot or not self.has_states):
                return count
        return 0

    def probe(self, namespace: Namespace, path: Path) -> int:
        return self.usable(namespace, path[: self.present(namespace, path)], len(path), 0)

    def named_window(self, namespace: Namespace, path: Path) -> list[int]:
        """As MatchResult has it."""
        if self.window is None:
            return []
        needed = self._needed(len(path))
        return [self._window_page(namespace, path, index) if index in needed else 0 for index in range(len(path))]

    def state_at(self, namespace: Namespace, path: Path) -> int:
        return self.snapshots.get(self._ending_at(namespace, path), 0)

    # -- match and insert

    def match(self, namespace: Namespace, path: Path) -> list[int]:
        found = path[: self.probe(namespace, path)]
        self._split_with_parts(namespace, found)
        self._touch(namespace, found)
        return self._refresh(namespace, found)

    def publish(
        self,
        namespace: Namespace,
        path: Path,
        num_tokens: int,
        pages: list[int],
        window: list[int],
        state: int,
        locked: int = 0,
    ) -> Outcome:
        """num_tokens: of the key, whose whole pages are `path`. locked: leading pages that the caller has locked."""
        given_from = self._given_from(path, window)
        whole = len(path)
        count = self.longest_publication(namespace, path, window, state)
        path = path[:count]
        there = self.present(namespace, path)
        self._split_with_parts(namespace, path[:there])
        if there < count:
            again = whole if self.has_states else (num_tokens - 1) // self.page_size  # where the same key would match
            begin = max(there, self._needed(min(count, again)).start) if self.window is not None else there
            for first, end in ((there, begin), (begin, count)):
                if first < end:
                    leaf = ListNode(namespace, path[:end], first, pages[first:end])
                    self.nodes.append(leaf)
                    self.oldest_first.append(leaf)
        self._split_tombstone(namespace, path, given_from)
        for node in reversed(self._on_path(namespace, path)):
            if self.window is not None and node not in self.windows and node.first >= given_from:
                self.windows[node] = window[node.first : len(node.path)]
                self.unused_windows.append(node)
        adopted = False
        if state and count == whole and path:
            end = self._ending_at(namespace, path)
            assert end is not None
            if end not in self.snapshots:
                self.snapshots[end] = state
                self.snapshots_oldest_first.append(end)
                adopted = True
        if locked < there < count:
            self._touch(namespace, path[:there])  # another prefix began alike: so may a third
        self._touch(namespace, path)
        found = self._refresh(namespace, path)
        listed = [self._window_page(namespace, path, index) for index in range(count)] if self.window else []
        return Outcome(found, listed, self.state_at(namespace, path) if path else 0, adopted)

    def longest_publication(self, namespace: Namespace, path: Path, window: list[int], state: int) -> int:
        """How many pages of `path` `publish` would publish."""
        return self.usable(namespace, path, self._given_from(path, window), state)

    # -- locks

    def lock_found(self, namespace: Namespace, path: Path) -> int:
        if self.window is not None and path:
            start = self._needed(len(path)).start
            needed = len(path) - start
            if any(node.first + needed <= start < len(node.path) for node in self._on_path(namespace, path)):
                self._split_with_parts(namespace, path[:start])
        number = self.lock(namespace, path)
        first = None
        if self.window is not None and path:
            covering = [
                node for node in self._on_path(namespace, path) if len(node.path) > self._needed(len(path)).start
            ]
            first = covering[0].first
        self.component_locks[number] = ModelLock(namespace, path, first)
        self.windows_oldest_first = [node for node in self.windows_oldest_first if not self.window_locked(node)]
        self.unused_windows = [node for node in self.unused_windows if not self.window_locked(node)]
        self.snapshots_oldest_first = [node for node in self.snapshots_oldest_first if not self.state_locked(node)]
        return number

    def unlock_window(self, number: int) -> None:
        lock = self.component_locks[number]
        before = {node for node in self.windows if self.window_locked(node)}
        lock.window_from = None
        self.windows_oldest_first += [
            node
            for node in reversed(self._on_path(lock.namespace, lock.path))
            if node in before and not self.window_locked(node)
        ]

    def unlock(self, number: int) -> None:
        self.unlock_window(number)
        lock = self.component_locks.pop(number)
        end = self._ending_at(lock.namespace, lock.path)
        if end in self.snapshots and not self.state_locked(end):
            self.snapshots_oldest_first.append(end)
        ListModel.unlock(self, number)
        self._drop_useless(end)

    def window_locked(self, node: ListNode) -> bool:
        return any(
            lock.window_from is not None
            and node.covers(lock.namespace, lock.path)
            and len(node.path) > lock.window_from
            for lock in self.component_locks.values()
        )

    def state_locked(self, node: ListNode) -> bool:
        return any((node.namespace, node.path) == (lock.namespace, lock.path) for lock in self.component_locks.values())

    # -- eviction

    def evict(self, num_pages: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_pages and self.oldest_first:
            node = self.oldest_first[0]
            freed += self._remove(node)
            freed += self._drop_useless(self._ending_at(node.namespace, node.path[: node.first]))
        return freed

    def evict_window(self, num_pages: int) -> int:
        before = sum(map(len, self.windows.values()))
        while before - sum(map(len, self.windows.values())) < num_pages:
            unused, used = (
                sum(len(self.windows[node]) for node in nodes)
                for nodes in (self.unused_windows, self.windows_oldest_first)
            )
            if not unused and not used:
                break
            is_over_its_share = SHARE * unused > unused + used
            node = (self.unused_windows if is_over_its_share or not used else self.windows_oldest_first).pop(0)
            del self.windows[node]
            self._drop_useless(node)
        return before - sum(map(len, self.windows.values()))

    def evict_states(self, num_states: int) -> int:
        before = len(self.snapshots)
        while before - len(self.snapshots) < num_states and self.snapshots_oldest_first:
            node = self.snapshots_oldest_first.pop(0)
            del self.snapshots[node]
            self._drop_useless(node)
        return before - len(self.snapshots)

    def reset(self) -> None:
        ListModel.reset(self)
        self.windows, self.snapshots, self.component_locks = {}, {}, {}
        self.windows_oldest_first, self.snapshots_oldest_first, self.unused_windows = [], [], []

    # -- within

    def _given_from(self, path: Path, window: list[int]) -> int:
        return next((index for index, page in enumerate(window) if page), len(path))

    def _needed(self, num_pages: int) -> range:
        """Page indexes with one of the last W tokens of so many pages."""
        if self.window is None:
            return range(0)
        return range(max(0, num_pages * self.page_size - self.window) // self.page_size, num_pages)

    def _window_page(self, namespace: Namespace, path: Path, index: int) -> int:
        for node, pages in self.windows.items():
            on_path = node.namespace == namespace and node.path[: index + 1] == path[: index + 1]
            if on_path and node.first <= index < len(node.path):
                return pages[index - node.first]
        return 0

    def _ending_at(self, namespace: Namespace, path: Path) -> ListNode | None:
        return next((node for node in self.nodes if node.namespace == namespace and node.path == path), None)

    def _touch(self, namespace: Namespace, path: Path) -> None:
        on_path = reversed(self._on_path(namespace, path)) if path else ()
        for node in on_path:
            needed = self.window is not None and len(node.path) > self._needed(len(path)).start
            for held in (self.unused_windows, self.windows_oldest_first):
                if needed and node in held:
                    held.remove(node)
                    self.windows_oldest_first.append(node)
                    break
            if node.path == path and node in self.snapshots_oldest_first:
                self.snapshots_oldest_first.remove(node)
                self.snapshots_oldest_first.append(node)

    def _split_tombstone(self, namespace: Namespace, path: Path, at: int) -> None:
        inside = [node for node in self._on_path(namespace, path) if node.first < at < len(node.path)]
        if self.window is not None and inside and inside[0] not in self.windows:
            self._split_with_parts(namespace, path[:at])

    def _split_with_parts(self, namespace: Namespace, path: Path) -> None:
        before = list(self.nodes)
        self._split_at(namespace, path)
        for upper in [node for node in self.nodes if node not in before]:
            (lower,) = self._lower_of(upper)
            if lower in self.windows:
                pages = self.windows[lower]
                kept = len(upper.pages)
                self.windows[upper], self.windows[lower] = pages[:kept], pages[kept:]
                if not self.window_locked(lower):
                    is_unused = lower in self.unused_windows or len(upper.path) <= self._needed(len(lower.path)).start
                    (self.unused_windows if is_unused else self.windows_oldest_first).append(upper)

    def _lower_of(self, upper: ListNode) -> list[ListNode]:
        return [
            node for node in self.nodes if node.first == len(upper.path) and upper.covers(node.namespace, node.path)
        ]

    def _drop_useless(self, node: ListNode | None) -> list[int]:
        freed: list[int] = []
        while node is not None and not self.is_locked(node) and not self._lower_of(node):
            lacks_window = self.window is not None and node not in self.windows
            if not lacks_window and not (self.has_states and node not in self.snapshots):
                break
            freed += self._remove(node)
            node = self._ending_at(node.namespace, node.path[: node.first])
        return freed

    def _remove(self, node: ListNode) -> list[int]:
        assert not self._lower_of(node), "not a leaf"
        self.nodes.remove(node)
        orders = (self.oldest_first, self.windows_oldest_first, self.unused_windows, self.snapshots_oldest_first)
        for held in orders:
            if node in held:
                held.remove(node)
        self.windows.pop(node, None)
        self.snapshots.pop(node, None)
        return node.pages
