"""Whether a plan can be applied at all. Asked before prepare changes anything, so that a refusal leaves no trace."""

from __future__ import annotations

import numpy as np

from app.core.batch import BatchPlan
from app.errors import OwnershipError, RequestError, StaleHandleError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from app.memory.req_to_token_pool import ReqToTokenPool


def check_plan(
    plan: BatchPlan, *, rows: ReqToTokenPool, allocator: PagedTokenToKVPoolAllocator, vocab_size: int
) -> None:
    """Raise unless every row, page and token that the plan names is the plan's to name. O(rows + pages + tokens).

    StaleHandleError for a row or a page that is not current, OwnershipError for a plan that names a row twice or a cell
    that the row does not have, RequestError for tokens that the model or a row cannot take. Capacity is not looked at.
    """
    row_tokens = rows.max_pages * allocator.page_size
    _check_rows(plan, rows)
    _check_positions(plan.decode_positions, plan.decode_positions, row_tokens)
    if plan.extend_slots.size:
        _check_extends(plan, vocab_size)
        _check_positions(plan.extend_starts, plan.extend_starts + plan.extend_lengths - 1, row_tokens)
    for admission in plan.admissions:
        allocator.check_held(admission.prefix_pages)
        if admission.sampling.reshapes_logits:
            _check_tokens("token_ids", admission.token_ids, vocab_size)
    for rewrite in plan.rewrites:
        allocator.check_held(rewrite.pages)
        if not 0 <= rewrite.first_page_index <= rows.page_counts[rewrite.slot] - rewrite.pages.size:
            raise OwnershipError(what=f"row {rewrite.slot}", reason="a rewrite of pages that the row does not have")


def _check_rows(plan: BatchPlan, rows: ReqToTokenPool) -> None:
    slots, generations = plan.decode_slots, plan.decode_generations
    if plan.extend_slots.size or plan.release_slots.size:
        old = plan.extend_slots >= 0
        slots = np.concatenate([slots, plan.extend_slots[old], plan.release_slots])
        generations = np.concatenate([generations, plan.extend_generations[old], plan.release_generations])
        _check_admitted(-1 - plan.extend_slots[~old], len(plan.admissions))
    rows.check_handles(slots, generations)
    _refuse_twice("row", slots)
    rows.check_handles(plan.published_slots, plan.published_generations)
    if plan.rewrites:
        rows.check_handles(
            np.array([rewrite.slot for rewrite in plan.rewrites], np.int32),
            np.array([rewrite.generation for rewrite in plan.rewrites], np.int32),
        )


def _check_admitted(numbers: np.ndarray, num_admissions: int) -> None:
    if numbers.size and numbers.max() >= num_admissions:
        raise StaleHandleError(what="admission", held=int(numbers.max()), current=f"{num_admissions} in this plan")
    _refuse_twice("admission", numbers)


def _refuse_twice(what: str, numbers: np.ndarray) -> None:
    if numbers.size > 1:
        counts = np.bincount(numbers)
        if counts.max() > 1:
            raise OwnershipError(what=f"{what} {int(counts.argmax())}", reason="named twice in one plan")


def _check_extends(plan: BatchPlan, vocab_size: int) -> None:
    lengths = plan.extend_lengths
    if lengths.min() < 1 or int(lengths.sum()) != plan.extend_token_ids.size:
        raise RequestError(
            field="extend_lengths", value=lengths.tolist(), allowed=f"1 or more, {plan.extend_token_ids.size} in all"
        )
    _check_tokens("extend_token_ids", plan.extend_token_ids, vocab_size)


def _check_tokens(field: str, token_ids: np.ndarray, vocab_size: int) -> None:
    if token_ids.size and (token_ids.min() < 0 or token_ids.max() >= vocab_size):
        wrong = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
        raise RequestError(field=field, value=int(wrong[0]), allowed=f"token ids of 0 to {vocab_size - 1}")


def _check_positions(first: np.ndarray, last: np.ndarray, row_tokens: int) -> None:
    if first.size and (first.min() < 0 or last.max() >= row_tokens):
        value = f"{first.min()} to {last.max()}"
        raise RequestError(field="positions", value=value, allowed=f"those of a row, 0 to {row_tokens - 1}")
