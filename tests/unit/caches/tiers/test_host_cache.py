"""The host tier's face: what becomes of pages that are handed to it."""

from __future__ import annotations

import numpy as np

from app.caches.tiers.host_cache import HostCache
from app.caches.tiers.span import Span
from app.config.model_config import Component
from app.core.transfers import PageCounts, PageIds
from tests.support.tier_runtime import TierRig
from tests.support.tree_model import key_of

FULL, SWA, RECURRENT = Component
KEY = key_of([1, 1, 2, 2, 3, 3, 4, 4])


class Given:
    """A host, and pages in our hands."""

    def __init__(self, *components: Component) -> None:
        self.rig = TierRig(components=frozenset({FULL, *components}), window=4)
        self.host: HostCache = self.rig.tiers.host

    def take(self, pages: int, window_pages: int = 0, states: int = 0) -> PageIds:
        ids = self.rig.host.allocate(PageCounts(pages, window_pages, states))
        assert ids is not None
        return ids

    def free(self) -> PageCounts:
        return PageCounts(*(pool.port.available() for pool in self.rig.host.allocators))


def test_pages_that_are_there_already_are_freed_and_not_told() -> None:
    given = Given()
    given.host.insert(KEY, Span(0, given.take(2).pages))

    adopted = given.host.insert(KEY, Span(1, given.take(3).pages))

    assert (adopted.first, adopted.num_pages, given.host.num_present(KEY)) == (2, 2, 4)
    assert given.free().pages == 32 - 4
    given.rig.check()


def test_pages_without_the_ones_before_them_are_freed() -> None:
    given = Given()
    assert given.host.insert(KEY, Span(2, given.take(2).pages)).num_pages == 0
    assert given.free().pages == 32
    given.rig.check()


def test_each_snapshot_is_put_where_it_was_taken() -> None:
    given = Given(RECURRENT)
    pages, _, (first, second) = given.take(4, 0, 2)
    adopted = given.host.insert(KEY, Span(0, pages, states=np.array([0, first, 0, second], np.int32)))

    assert adopted.states.tolist() == [0, first, 0, second]
    assert given.host.probe(key_of([*KEY.tokens()[:4], 50, 50])) == 4
    assert given.host.probe(key_of([*KEY.tokens(), 50])) == 8
    given.rig.check()


def test_what_no_snapshot_or_window_makes_usable_is_freed() -> None:
    given = Given(SWA, RECURRENT)
    pages, windows, (state,) = given.take(4, 3, 1)
    held = np.array([windows[0], windows[1], 0, windows[2]], np.int32)
    adopted = given.host.insert(KEY, Span(0, pages, held, np.array([0, state, 0, 0], np.int32)))

    assert (adopted.pages != 0).tolist() == [True, True, False, False][: adopted.num_pages]
    assert given.host.num_present(KEY) == 2
    assert given.free() == PageCounts(32 - 2, 32 - 2, 32 - 1)
    given.rig.check()


def test_drop_takes_the_end_of_a_path_as_far_as_nothing_needs_it() -> None:
    given = Given()
    other = key_of([1, 1, 2, 2, 9, 9])
    given.host.insert(KEY, Span(0, given.take(4).pages))
    given.host.insert(other, Span(2, given.take(1).pages))

    given.host.drop(KEY)

    assert (given.host.num_present(KEY), given.host.num_present(other)) == (2, 3)
    given.host.drop(other.head(4))
    assert given.host.num_present(other) == 3, "a longer prefix needs it"
    given.host.drop(other)
    assert given.host.num_present(other) == 0


def test_room_is_promised_once() -> None:
    given = Given()
    assert given.host.make_room(PageCounts(20))
    assert not given.host.make_room(PageCounts(13))
    assert given.host.make_room(PageCounts(12))
    given.host.end_plan()
    assert given.host.available().pages == 32


BRANCH = key_of([1, 1, 2, 2, 3, 3, 9, 9])


def test_what_the_device_has_too_goes_before_what_was_used_longer_ago() -> None:
    given = Given()
    other = key_of([7, 7, 8, 8])
    given.host.insert(other, Span(0, given.take(2).pages))
    given.host.insert(KEY, Span(0, given.take(4).pages))

    given.host.spare(given.host.place(KEY), 4)
    given.host.make_room(PageCounts(28))

    assert (given.host.num_present(other), given.host.num_present(KEY)) == (2, 0)


def test_what_the_device_let_go_of_is_kept_like_anything_else() -> None:
    given = Given()
    other = key_of([7, 7, 8, 8])
    given.host.insert(other, Span(0, given.take(2).pages))
    given.host.insert(KEY.head(4), Span(0, given.take(2).pages))
    given.host.insert(KEY, Span(2, given.take(2).pages))
    given.host.spare(given.host.place(KEY), 4)

    given.host.spare(given.host.place(KEY), 2)
    given.host.make_room(PageCounts(28))

    assert (given.host.num_present(other), given.host.num_present(KEY)) == (0, 4)


def test_a_few_pages_that_keep_more_of_what_the_device_has_too_go_with_it() -> None:
    given = Given()
    given.host.insert(KEY.head(6), Span(0, given.take(3).pages))
    given.host.insert(BRANCH, Span(3, given.take(1).pages))
    given.host.spare(given.host.place(KEY.head(6)), 3)

    given.host.make_room(PageCounts(30))

    assert given.host.num_present(BRANCH) == 0
    given.rig.check()


def test_many_pages_below_what_the_device_has_too_keep_it_until_they_go() -> None:
    given = Given()
    other = key_of([7, 7, 8, 8])
    given.host.insert(KEY.head(2), Span(0, given.take(1).pages))
    given.host.insert(KEY, Span(1, given.take(3).pages))
    given.host.insert(other, Span(0, given.take(2).pages))
    given.host.spare(given.host.place(KEY.head(2)), 1)

    given.host.make_room(PageCounts(26))
    assert (given.host.num_present(KEY), given.host.num_present(other)) == (4, 2)
    given.host.end_plan()
    given.host.make_room(PageCounts(27))

    assert (given.host.num_present(KEY), given.host.num_present(other)) == (0, 2)
    assert given.host.available().pages == 3, "the one above went along"
    given.rig.check()


def test_what_is_locked_or_below_a_lock_is_no_longer_spare_room() -> None:
    given = Given()
    given.host.insert(KEY.head(6), Span(0, given.take(3).pages))
    given.host.insert(BRANCH, Span(3, given.take(1).pages))
    given.host.spare(given.host.place(KEY.head(6)), 3)
    receipt = given.host.hold(given.host.place(BRANCH))

    assert not given.host.make_room(PageCounts(29))

    assert given.host.num_present(BRANCH) == 4
    given.host.unlock(receipt)
    given.rig.check()


def test_nothing_is_spare_once_the_device_has_lost_everything() -> None:
    given = Given()
    other = key_of([7, 7, 8, 8])
    given.host.insert(other, Span(0, given.take(2).pages))
    given.host.insert(KEY, Span(0, given.take(4).pages))
    given.host.spare(given.host.place(KEY), 4)

    given.rig.cache.reset()
    given.host.make_room(PageCounts(28))

    assert (given.host.num_present(other), given.host.num_present(KEY)) == (0, 4)
