"""A backup that cannot be copied is given up, also where it goes out in several parts."""

from __future__ import annotations

from app.config.tier_settings import TierSettings
from app.core.transfers import Backup
from tests.support.tier_runtime import PAGE_BYTES, Fate, TierRig


def test_the_rest_of_a_prefix_is_not_tried_again_when_its_beginning_failed() -> None:
    # given: of 8 pages, so much fits one plan as staging has room for
    rig = TierRig(
        page_size=2,
        staging_bytes=3 * PAGE_BYTES.pages,
        settings=TierSettings(write_policy="write_through"),
        fate=lambda _: Fate(failure="failed"),
    )

    # when
    rig.serve(range(16))
    rig.drain()

    # then
    assert [type(each) for each in rig.sent] == [Backup]
    assert rig.host_has(range(16)) == 0
    rig.check()


def test_the_rest_of_a_prefix_that_the_host_lets_go_of_again_is_given_up() -> None:
    # given: a host without room for all of it, that keeps nothing which storage has no use for
    rig = TierRig(
        page_size=2,
        num_pages=6,
        num_host_pages=3,
        settings=TierSettings(write_policy="write_through", host_mode="buffer_only"),
    )

    # when
    rig.serve(range(8))
    rig.drain()

    # then
    assert [each.source.pages.size for each in rig.sent] == [3]
    rig.check()


def test_prefixes_that_take_the_host_from_each_other_are_not_copied_for_ever() -> None:
    # given: two of 6 pages each in a host of 8, in parts of 3
    rig = TierRig(
        page_size=2,
        num_pages=16,
        num_host_pages=8,
        staging_bytes=3 * PAGE_BYTES.pages,
        settings=TierSettings(write_policy="write_through"),
    )

    # when
    for first in (0, 100):
        rig.serve(range(first, first + 12))
    rig.drain()

    # then
    assert sum(each.source.pages.size for each in rig.sent) <= 12
    rig.check()
