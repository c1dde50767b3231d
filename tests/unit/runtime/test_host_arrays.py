"""H08: a step's results never depend on what happens to host arrays after its dispatch."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from app.core.sampling import SamplingParams
from tests.support.engine import CONTEXT_LENGTH, cold_tokens
from tests.support.runtime import RuntimeRig, opened_runtime

ROWS = 16
PROMPTS = [np.random.default_rng(row).integers(0, 256, CONTEXT_LENGTH - 8).astype(np.int32) for row in range(ROWS)]


def busy_device() -> jax.Array:
    """Work that keeps the device's queue from running dry while the test edits arrays."""
    square = np.ones((600, 600), np.float32)
    return jax.jit(lambda x: jax.lax.fori_loop(0, 20, lambda _, held: (held @ held) * 0.0, x))(square)


def scribble(rig: RuntimeRig, *plans: object) -> None:
    """Overwrite every array of the plans, and the runtime's own mirrors of page table and sampling state."""
    for plan in plans:
        for field in dataclasses.fields(plan):
            array = getattr(plan, field.name)
            if isinstance(array, np.ndarray) and array.flags.writeable:
                array[...] = 1
    rig.rows._mirror[...] = 1
    for name, array in vars(rig.container.row_sampling()).items():
        if isinstance(array, np.ndarray) and name != "_reshaped":
            array[...] = 1


def test_arrays_of_a_plan_and_mirrors_of_the_runtime_may_change_after_dispatch() -> None:
    """1920 prompt tokens and a page table of 2048 cells: above the size to which jax copies."""
    # given
    with opened_runtime(page_size=1, max_total_tokens=2048, max_running_requests=ROWS) as rig:
        prompts = rig.prompt_plan(*PROMPTS)
        blocker = busy_device()

        # when
        prepared = rig.runtime.prepare_batch(prompts)
        first = rig.runtime.execute_batch(prepared)
        decodes = rig.decode_plan(prepared, *[PROMPTS[0].size] * ROWS)
        decodes = dataclasses.replace(decodes, decode_slots=prepared.admitted_slots.copy())
        second = rig.runtime.execute_batch(rig.runtime.prepare_batch(decodes))
        scribble(rig, prompts, decodes)

        # then
        got = np.stack([first.wait().token_ids, second.wait().token_ids]).T.tolist()
        assert got == [cold_tokens(prompt, 2) for prompt in PROMPTS]
        blocker.block_until_ready()


def test_sampling_parameters_may_change_after_dispatch() -> None:
    """A row that is given to another request while its last step still runs keeps its own temperature and seed."""
    with opened_runtime(page_size=1, max_total_tokens=2048, max_running_requests=ROWS) as rig:
        sampled = SamplingParams(seed=5, temperature=1.5, top_k=40)
        expected = rig.run(rig.prompt_plan(*PROMPTS[:2], sampling=sampled))[1].token_ids.tolist()

        blocker = busy_device()
        step = rig.runtime.execute_batch(rig.runtime.prepare_batch(rig.prompt_plan(*PROMPTS[:2], sampling=sampled)))
        scribble(rig)

        assert step.wait().token_ids.tolist() == expected
        blocker.block_until_ready()
