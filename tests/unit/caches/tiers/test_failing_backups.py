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
