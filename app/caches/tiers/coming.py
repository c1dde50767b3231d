"""What the host has of a prefix, together with what is on its way there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from app.caches.base import NO_PAGES
from app.caches.tiers.host_cache import HostCache
from app.caches.tiers.needs import Lack, Needs
from app.caches.tiers.span import Span
from app.core.keys import TOKEN_BYTES, RadixKey


class Coming(Protocol):
    """Part of a prefix that will be on the host, if all goes well."""

    @property
    def key(self) -> RadixKey: ...

    @property
    def span(self) -> Span: ...


def lack(
    host: HostCache, needs: Needs, coming: Iterable[Coming], key: RadixKey, num_pages: int, read: Callable[[int], Span]
) -> Lack | None:
    """What the host will not have of the first `num_pages` pages of `key`; None if it is nothing that counts.

    read: what the device has from a page index on, to num_pages. O(len(key) * what is coming for the same first page).
    """
    page_bytes = needs.page_size * TOKEN_BYTES
    present = host.num_present(key)
    related: list[tuple[Coming, int]] = []
    for each in coming:
        if needs.is_plain and not _might_extend(each, key, present, page_bytes):
            continue
        shared = shared_pages(key, each.key, page_bytes)
        related.append((each, shared))
        if _reaches(each, present) and shared > present:
            present = min(shared, each.span.end)
    if needs.is_plain and present >= num_pages:
        return None
    first = min(present, num_pages - 1, needs.first_window_page(min(present + 1, num_pages)))
    here = read(first)
    if here.num_pages == 0:
        return None
    if needs.is_plain:
        return Lack(here, present, NO_PAGES, NO_PAGES)
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


def _might_extend(each: Coming, key: RadixKey, present: int, page_bytes: int) -> bool:
    """Whether it has the page at index `present`, by looking at no other page."""
    at = slice(present * page_bytes, (present + 1) * page_bytes)
    return _reaches(each, present) and key.uncut[at] == each.key.uncut[at]


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
