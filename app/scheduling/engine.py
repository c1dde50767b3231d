"""Running a scheduler until given requests have ended: what the command line and the benchmarks need."""

from __future__ import annotations

from collections.abc import Iterable

from app.errors import RequestError
from app.scheduling.request import Request, RequestOutput
from app.scheduling.scheduler import Scheduler


def generate_all(scheduler: Scheduler, requests: Iterable[Request]) -> list[RequestOutput]:
    """Serve `requests` together; -> their replies in the same order. RequestError, before any runs, if one is refused.

    On any other way out (Ctrl-C) the requests are aborted, so that the scheduler is as it was.
    """
    requests = list(requests)
    outputs: dict[str, RequestOutput] = {}
    added: list[str] = []
    try:
        for request in requests:
            scheduler.add(request)
            added.append(request.request_id)
        while len(outputs) < len(requests):
            outputs.update((output.request_id, output) for output in scheduler.step())
    except (RequestError, KeyboardInterrupt):
        for request_id in added:
            scheduler.abort(request_id)
        raise
    finally:
        while scheduler.has_work() and len(outputs) < len(requests):
            outputs.update((output.request_id, output) for output in scheduler.step())
    while scheduler.has_work():
        scheduler.step()
    return [outputs[request.request_id] for request in requests]
