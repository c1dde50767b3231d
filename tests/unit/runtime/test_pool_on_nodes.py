"""A pool that lies on several nodes is not made anew: no node knows what the others saw of a failure."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dependency_injector import providers

from app.core.sampling import SamplingParams
from app.errors import NodesFailedError
from app.providers.testing import Override, failing_runner
from app.scheduling.engine import generate_all
from app.scheduling.request import Request
from app.tpu.cpu_fake import FakeDevicePool
from app.tpu.failing_runner import InjectedFailure
from tests.support.engine import VOCAB_SIZE
from tests.support.runtime import ints, opened_runtime

KINDS = [pytest.param(True, id="at dispatch"), pytest.param(False, id="while it runs")]


class PoolOnTwoNodes(FakeDevicePool):
    """One process's pool that says there is another one."""

    @property
    def num_nodes(self) -> int:
        return 2


def failing(step: int, at_dispatch: bool) -> dict[str, Override]:
    failure = InjectedFailure(step=step, at_dispatch=at_dispatch)
    return {
        "device_pool": lambda container: providers.ThreadSafeSingleton(
            PoolOnTwoNodes, container.pool_spec, container.mesh
        ),
        "model_runner": failing_runner(failure),
    }


@pytest.mark.parametrize("at_dispatch", KINDS)
def test_a_step_that_fails_is_raised_and_nothing_more_is_run(at_dispatch: bool) -> None:
    with opened_runtime(failing(0, at_dispatch)) as rig:
        prepared = rig.runtime.prepare_batch(rig.prompt_plan(ints(*range(5))))
        identity = rig.runtime.identity

        with pytest.raises(NodesFailedError, match=r"lies on 2 nodes, .* start all nodes again"):
            rig.runtime.execute_batch(prepared).wait()

        assert rig.runtime.identity == identity
        with pytest.raises(NodesFailedError):
            rig.runtime.prepare_batch(rig.prompt_plan(ints(1)))


def test_what_an_earlier_step_produced_can_still_be_read() -> None:
    with opened_runtime(failing(1, at_dispatch=True)) as rig:
        # given: a step that is not read yet
        prepared = rig.runtime.prepare_batch(rig.prompt_plan(ints(*range(5))))
        earlier = rig.runtime.execute_batch(prepared)

        # when
        later = rig.runtime.prepare_batch(rig.decode_plan(prepared, 5))
        with pytest.raises(NodesFailedError):
            rig.runtime.execute_batch(later)

        # then
        completion = earlier.wait()
        assert completion.failure is None
        assert 0 <= completion.token_ids[0] < VOCAB_SIZE


@pytest.mark.parametrize("at_dispatch", KINDS)
def test_serving_ends_with_that_error_instead_of_going_on_alone(at_dispatch: bool) -> None:
    with opened_runtime(failing(2, at_dispatch)) as rig:
        requests = [_request(number) for number in range(4)]

        with pytest.raises(NodesFailedError):
            generate_all(rig.container.scheduler(), requests)


def _request(number: int) -> Any:
    return Request(
        request_id=str(number),
        prompt_token_ids=np.arange(5 + number, dtype=np.int32),
        sampling=SamplingParams(max_tokens=8, ignore_eos=True),
    )
