"""Which programs jax traces and compiles meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

_EVENTS = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration")


@contextmanager
def compiled_programs() -> Iterator[list[str]]:
    """The names of functions traced or compiled within the block, in order. A program that was kept on disk counts."""
    names: list[str] = []

    def listen(event: str, _seconds: float, **facts: Any) -> None:
        if event in _EVENTS:
            names.append(str(facts["fun_name"]))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
