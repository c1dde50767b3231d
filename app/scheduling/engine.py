"""Running a scheduler until given requests have ended: what the command line and the benchmarks need."""

from __future__ import annotations

import time
from collections.abc import Iterable

from app.errors import RequestError
from app.scheduling.request import Request, RequestOutput
from app.scheduling.scheduler import Scheduler

DRAIN_S = 5.0


def generate_all(scheduler: Scheduler, requests: Iterable[Request]) -> list[RequestOutput]:
    """Serve `requests` together; -> their replies in the same order. RequestError, before any runs, if one is refused.

    What they left to be moved between tiers is moved then, for at most DRAIN_S.

    The scheduler is this call's alone: replies to requests that others added are lost. On any other way out (Ctrl-C)
    what has not ended is aborted, so that the scheduler is as it was.
    """
    requests = list(requests)
    outputs: dict[str, RequestOutput] = {}
    added: set[str] = set()
    try:
        for request in requests:
            if request.request_id in added:
                raise RequestError(field="request_id", value=request.request_id, allowed="an id that is given once")
            scheduler.add(request)
            added.add(request.request_id)
        while not added <= outputs.keys():
            outputs.update((output.request_id, output) for output in scheduler.step())
    finally:
        for request_id in added - outputs.keys():
            scheduler.abort(request_id)
        while scheduler.has_work():
            scheduler.step()
    _drain(scheduler)
    return [outputs[request.request_id] for request in requests]


def _drain(scheduler: Scheduler) -> None:
    deadline = time.monotonic() + DRAIN_S
    while scheduler.has_background_work() and time.monotonic() < deadline:
        scheduler.step()
