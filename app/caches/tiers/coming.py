"""What the host has of a prefix, together with what is on its way there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from app.caches.base import NO_PAGES, LockReceipt
from app.caches.tiers.host_cache import HostCache
from app.caches.tiers.host_tree import HostPlace
from app.caches.tiers.needs import Lack, Needs
from app.caches.tiers.span import Span
from app.caches.tree.node import TreeNode
from app.core.keys import TOKEN_BYTES, RadixKey
from app.core.transfers import PageIds


class Coming(Protocol):
    """Part of a prefix that will be on the host, if all goes well."""

    @property
    def key(self) -> RadixKey: ...

    @property
    def span(self) -> Span: ...


@dataclass(frozen=True, slots=True)
class Leaving:
    """Device pages that the next plan frees, and what they hold: `span` of `key`."""

    key: RadixKey
    span: Span


@dataclass(slots=True)
class BackupUnderWay:
    """span: of device pages. receipt: of the host pages before it, or of those that were there.

    num_held: how many that are. node: of the device's tree, at the end of `key`; None where that is not known.
    host_ids: once prepared.
    """

    number: int
    key: RadixKey
    span: Span
    receipt: LockReceipt
    num_held: int
    node: TreeNode | None
    is_leaving: bool
    host_ids: PageIds | None = None

    def ids(self) -> PageIds:
        assert self.host_ids is not None
        return self.host_ids


def lack(
    host: HostCache,
    needs: Needs,
    coming: Iterable[Coming],
    key: RadixKey,
    place: HostPlace,
    num_pages: int,
    read: Callable[[int], Span],
) -> Lack | None:
    """What the host will not have of the first `num_pages` pages of `key`; None if it is nothing that counts.

    place: what the host has of it now. read: what the device has from a page index on, to num_pages.
    O(len(key) * what is coming for the same first page).
    """
    page_bytes = needs.page_size * TOKEN_BYTES
    if needs.is_plain:
        present = _pages_then(place.num_pages, coming, key, page_bytes)
        if present >= num_pages:
            return None
        here = read(present)
        return Lack(here, present, NO_PAGES, NO_PAGES) if here.num_pages else None
    present = place.num_pages
    related: list[tuple[Coming, int]] = []
    for each in coming:
        shared = shared_pages(key, each.key, page_bytes)
        related.append((each, shared))
        if _reaches(each, present) and shared > present:
            present = min(shared, each.span.end)
    first = min(present, num_pages - 1, needs.first_window_page(min(present + 1, num_pages)))
    here = read(first)
    if here.num_pages == 0:
        return None
    windows_there, states_there = _parts_there(host.span(key, first), here, related)
    return Lack(here, present, windows_there, states_there)


def shared_pages(one: RadixKey, other: RadixKey, page_bytes: int) -> int:
    """Leading whole pages that two keys have in common. O(tokens in common)."""
    if one.namespace != other.namespace:
        return 0
    count = min(len(one.raw), len(other.raw)) // page_bytes * page_bytes
    if one.raw[:page_bytes] != other.raw[:page_bytes] or not count:
        return 0
    differs = np.frombuffer(one.raw, np.int32, count // TOKEN_BYTES) != np.frombuffer(
        other.raw, np.int32, count // TOKEN_BYTES
    )
    first = int(differs.argmax())
    return (first * TOKEN_BYTES if differs[first] else count) // page_bytes


def _pages_then(present: int, coming: Iterable[Coming], key: RadixKey, page_bytes: int) -> int:
    """How many pages of `key` will be there, of full pages alone.

    Most of what is coming is passed by with a look at one page.
    """
    raw = key.uncut
    at = slice(present * page_bytes, (present + 1) * page_bytes)
    for each in coming:
        first, pages = each.span.first, each.span.pages
        if first <= present < first + pages.size and raw[at] == each.key.uncut[at]:
            shared = shared_pages(key, each.key, page_bytes)
            if shared > present:
                present = min(shared, first + pages.size)
                at = slice(present * page_bytes, (present + 1) * page_bytes)
    return present


def _reaches(each: Coming, present: int) -> bool:
    """Whether it brings the full page at index `present`."""
    return each.span.first <= present < each.span.end and bool(each.span.pages[present - each.span.first])


def _parts_there(there: Span, here: Span, related: Iterable[tuple[Coming, int]]) -> tuple[np.ndarray, np.ndarray]:
    """(n,) bool for each page index of `here`: whether the window page, and the snapshot, are there or coming."""
    windows, states = np.zeros(here.window_pages.size, np.bool_), np.zeros(here.states.size, np.bool_)
    for span, shared in ((there, there.end), *((each.span, shared) for each, shared in related)):
        begin, end = max(span.first, here.first), min(span.end, shared, here.end)
        if end > begin:
            mine, its = slice(begin - here.first, end - here.first), slice(begin - span.first, end - span.first)
            windows[mine] |= span.window_pages[its] != 0
            states[mine] |= span.states[its] != 0
    return windows, states
