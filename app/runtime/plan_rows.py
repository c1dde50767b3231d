"""The rows of a plan in order, decode rows first: who they are, and how many pages each lacks."""

from __future__ import annotations

import numpy as np

from app.core.batch import BatchPlan
from app.memory.req_to_token_pool import ReqToTokenPool


def row_slots(plan: BatchPlan, admitted: np.ndarray) -> np.ndarray:
    """(rows,) int32: decode rows, then extend rows, admissions resolved."""
    if not plan.extend_slots.size:
        return plan.decode_slots
    extend_slots = plan.extend_slots.copy()
    new = extend_slots < 0
    extend_slots[new] = admitted[-1 - extend_slots[new]]
    return np.concatenate([plan.decode_slots, extend_slots])


def row_lengths(plan: BatchPlan) -> np.ndarray:
    """(rows,) int32: tokens of each row whose KV is written once this step has run."""
    return np.concatenate([plan.decode_positions + 1, plan.extend_starts + plan.extend_lengths])


def page_needs(plan: BatchPlan, rows: ReqToTokenPool, page_size: int) -> np.ndarray:
    """(rows,) int32 pages that each row lacks for its tokens of this step."""
    needs = plan.decode_positions // page_size + 1 - rows.page_counts[plan.decode_slots]
    if plan.extend_slots.size:
        needs = np.concatenate([needs, _extend_needs(plan, rows, page_size)])
    return np.maximum(needs, 0, dtype=np.int32)


def _extend_needs(plan: BatchPlan, rows: ReqToTokenPool, page_size: int) -> np.ndarray:
    prefix_counts = np.array([admission.prefix_pages.size for admission in plan.admissions], np.int32)
    new = plan.extend_slots < 0
    held = rows.page_counts[np.where(new, 0, plan.extend_slots)]
    held[new] = prefix_counts[-1 - plan.extend_slots[new]]
    return -(-(plan.extend_starts + plan.extend_lengths) // page_size) - held
