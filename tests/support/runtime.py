"""A runtime without a scheduler: plans of one's own, and everything that a plan could have changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from app.core.batch import BatchPlan, BatchPlanBuilder
from app.core.handles import CacheExtentRef
from app.core.sampling import SamplingParams
from app.providers.testing import Override, overridden
from app.tpu.cpu_fake import fake_model_config
from tests.support.engine import CONTEXT_LENGTH, VOCAB_SIZE, server_args

GREEDY = SamplingParams(seed=0)
NO_PAGES = np.empty(0, np.int32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class RuntimeRig:
    """An open LocalRuntime over fakes, with the parts that it owns."""

    def __init__(self, container: Any, runtime: Any = None) -> None:
        """runtime: one that was made of the container's parts, instead of the container's own."""
        self.container = container
        self.runtime = runtime or container.runtime()
        self.allocator = container.token_allocator()
        self.port = self.allocator.port
        self.rows = container.req_to_token_pool()

    def builder(self) -> BatchPlanBuilder:
        """A plan that begins with everything freed so far, as control's do."""
        builder = BatchPlanBuilder(self.runtime.identity)
        builder.free(self.port.recorded_frees())
        return builder

    def prompt_plan(
        self, *prompts: np.ndarray, prefix: np.ndarray = NO_PAGES, sampling: SamplingParams = GREEDY
    ) -> BatchPlan:
        """Admit each prompt, all of it in one chunk after `prefix`."""
        builder = self.builder()
        start = prefix.size * self.allocator.page_size
        for prompt in prompts:
            extent = CacheExtentRef.of(self.runtime.identity, prefix)
            slot = builder.admit(extent, prompt, prompt.size, sampling)
            builder.extend(slot, 0, start, prompt[start:], samples=True)
        return builder.build()

    def decode_plan(self, prepared: Any, *positions: int) -> BatchPlan:
        """One token for each row that `prepared` admitted."""
        builder = self.builder()
        builder.decode(prepared.admitted_slots, prepared.admitted_generations, ints(*positions))
        return builder.build()

    def release_plan(self, prepared: Any) -> BatchPlan:
        """End every row that `prepared` admitted."""
        builder = self.builder()
        for admission in range(prepared.admitted_slots.size):
            builder.release(prepared.handle(admission))
        return builder.build()

    def run(self, plan: BatchPlan) -> tuple[Any, Any]:
        """-> what was prepared, and the completion."""
        prepared = self.runtime.prepare_batch(plan)
        return prepared, self.runtime.execute_batch(prepared).wait()

    def snapshot(self) -> dict[str, Any]:
        """All that a prepare may change, as plain values."""
        rows, sampling = self.rows, self.container.row_sampling()
        arrays = {name: value for name, value in vars(sampling).items() if isinstance(value, np.ndarray)}
        return {
            "free": self.allocator.free_page_ids().tolist(),
            "recorded": self.allocator.recorded_page_ids().tolist(),
            "held": self.allocator.held_page_ids().tolist(),
            "generations": rows.generations.tolist(),
            "in use": rows.slots_in_use().tolist(),
            "free rows": rows.num_free,
            "pages": [rows.row_pages(slot).tolist() for slot in range(rows.num_rows)],
            "device table": np.asarray(rows.device_table()).tolist(),
            "sampling": {name: value.tolist() for name, value in arrays.items()},
            "last tokens": np.asarray(sampling.last_tokens()).tolist(),
            "identity": self.runtime.identity,
        }


@contextmanager
def opened_runtime(overrides: dict[str, Override] | None = None, **fields: Any) -> Iterator[RuntimeRig]:
    """`fields` are those of ServerArgs."""
    model = fake_model_config(vocab_size=VOCAB_SIZE, context_length=CONTEXT_LENGTH)
    with overridden(server_args(**fields), fake=True, model=model, **(overrides or {})) as container:
        yield RuntimeRig(container)
