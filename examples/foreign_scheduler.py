"""A scheduler of one's own: it takes `container.tree_cache()` and `container.runtime()`, and nothing else.

One request at a time: match and lock, prefill in one plan, decode, publish, free what is left. Run it with

    python examples/foreign_scheduler.py
"""

import numpy as np

from app.config.server_args import ServerArgs
from app.core.batch import BatchPlanBuilder
from app.core.handles import CacheExtentRef
from app.core.keys import RadixKey
from app.core.sampling import SamplingParams
from app.providers.testing import overridden


def serve(cache, runtime, prompt: np.ndarray, num_tokens: int) -> tuple[list[int], int]:
    """-> (output tokens, prompt tokens that were cached)."""
    found = cache.match(RadixKey.of(prompt))
    receipt = cache.lock(found)
    pages = found.pages
    cache.evict(-(-(prompt.size + num_tokens) // cache.page_size) - cache.token_allocator.available())

    def step(build) -> tuple:
        nonlocal pages
        plan = BatchPlanBuilder(runtime.identity)
        plan.free(cache.token_allocator.recorded_frees())
        build(plan)
        prepared = runtime.prepare_batch(plan.build())
        pages = np.concatenate([pages, prepared.pages])
        return prepared, runtime.execute_batch(prepared).wait()

    def admit(plan: BatchPlanBuilder) -> None:
        prefix = CacheExtentRef.of(runtime.identity, found.pages)
        row = plan.admit(prefix, prompt, prompt.size, SamplingParams(max_tokens=num_tokens, seed=0))
        plan.extend(row, 0, found.num_tokens, prompt[found.num_tokens :], samples=True)

    prepared, completion = step(admit)
    slot, generation = prepared.admitted_slots, prepared.admitted_generations
    output = completion.token_ids.tolist()
    while len(output) < num_tokens:
        position = np.array([prompt.size + len(output) - 1], np.int32)
        output += step(lambda plan, at=position: plan.decode(slot, generation, at))[1].token_ids.tolist()
    settled = np.concatenate([prompt, np.array(output[:-1], np.int32)])  # the last token's KV was never written
    kept = cache.insert(RadixKey.of(settled), pages).pages
    own = pages[found.pages.size :]
    cache.token_allocator.free(own[~np.isin(own, kept)])  # duplicates and the partial page
    cache.unlock(receipt)
    step(lambda plan: plan.release(prepared.handle(0)))
    return output, found.num_tokens


if __name__ == "__main__":
    with overridden(ServerArgs(page_size=4, max_total_tokens=256), fake=True) as container:
        question = np.arange(1, 40, dtype=np.int32)
        for _ in range(2):
            print(serve(container.tree_cache(), container.runtime(), question, 8))
        container.tree_cache().check_integrity()
