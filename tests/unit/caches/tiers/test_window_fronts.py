"""What the tiers do with window pages that no prefix has needed: those in front of a prompt's end."""

from __future__ import annotations

from app.config.model_config import Component
from app.config.tier_settings import TierSettings
from tests.support.tier_runtime import TierRig


def test_a_front_that_nobody_needed_is_not_copied_when_it_goes_and_the_end_is() -> None:
    # given a prompt of eight pages, of which its end needs the windows of two
    rig = TierRig(
        components=frozenset({Component.FULL, Component.SWA}), settings=TierSettings(write_policy="write_back")
    )
    rig.serve(range(17))
    assert rig.cache.evictable_window_pages == 8

    # when the windows in front go
    rig.cache.evict_window(1)
    rig.drain()

    # then nothing was copied, and the prompt can be continued
    assert (rig.cache.evictable_window_pages, len(rig.sent)) == (2, 0)
    assert (rig.device_has(range(17)), rig.host_has(range(17))) == (8, 0)

    # when those of its end go, and with them the prompt
    rig.cache.evict_window(1)
    rig.drain()

    # then it is on the host
    assert (rig.device_has(range(17)), rig.host_has(range(17))) == (0, 8)
    assert rig.serve(range(17)) == 16
    rig.check()


def test_a_front_whose_end_has_left_is_copied_before_it_goes_with_its_pages() -> None:
    # given the front of a prompt that is a leaf by now
    rig = TierRig(
        components=frozenset({Component.FULL, Component.SWA}), settings=TierSettings(write_policy="write_back")
    )
    rig.serve(range(17))
    rig.cache.evict(2)
    rig.drain()
    rig.tiers.flush()
    sent = len(rig.sent)
    assert rig.device_has(range(17)) == 6

    # when
    rig.cache.evict_window(1)
    rig.drain()

    # then
    assert (rig.device_has(range(17)), rig.host_has(range(17))) == (0, 6)
    assert len(rig.sent) == sent + 1
    rig.check()
