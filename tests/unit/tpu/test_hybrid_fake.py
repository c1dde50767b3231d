"""The hybrid fake answers as the plain one does, until anything that it reads is wrong."""

from __future__ import annotations

import numpy as np
import pytest

from app.config.model_config import StateArray
from app.core.ports import DecodeInputs, ExtendInputs, PoolSpec, StateSpec, WindowPages
from app.core.sliding_window import first_seen_page
from app.tpu.hybrid_fake import FakeHybridPool, HybridFakeRunner
from app.tpu.hybrid_layout import HybridSpec
from tests.support.engine import VOCAB_SIZE, cold_logits

PAGE_SIZE, WINDOW = 4, 6
TOKENS = np.random.default_rng(0).integers(0, 256, 23).astype(np.int32)
FULL_PAGES = np.array([3, 1, 7, 2, 6, 5], np.int32)
WINDOW_PAGES = np.array([2, 5, 1, 4, 3, 6], np.int32)
ROW_STATE = 4  # slot of the row's running state: after 3 snapshots


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Rig:
    """One row, and beside it a row of padding."""

    def __init__(self) -> None:
        spec = PoolSpec(num_pages=8, page_size=PAGE_SIZE, num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
        states = StateSpec(num_snapshots=3, num_rows=1, num_layers=1, arrays=(StateArray(shape=(3,)),))
        self.pool = FakeHybridPool(spec, HybridSpec(full=spec, window=spec, states=states))
        self.pool.open()
        self.runner = HybridFakeRunner(VOCAB_SIZE, WINDOW)
        self.length = 0

    def window(self) -> WindowPages:
        first = first_seen_page(self.length, WINDOW, PAGE_SIZE)
        table = np.zeros((2, 6), np.int32)
        table[0, : 6 - first] = WINDOW_PAGES[first:]
        return WindowPages(page_table=table, first_pages=ints(first, 0))

    def extend(self, count: int) -> np.ndarray:
        """The next tokens in one chunk. -> the row's logits."""
        chunk = np.zeros(16, np.int32)
        chunk[:count] = TOKENS[self.length : self.length + count]
        inputs = ExtendInputs(
            token_ids=chunk,
            chunk_starts=ints(0, 0),
            chunk_lengths=ints(count, 0),
            prefix_lengths=ints(self.length, 0),
            page_table=np.stack([FULL_PAGES, np.zeros_like(FULL_PAGES)]),
            max_chunk=16,
            window=self.window(),
            state_slots=ints(ROW_STATE, 99),
        )
        return self._run(self.runner.extend, inputs, count)

    def decode(self) -> np.ndarray:
        inputs = DecodeInputs(
            token_ids=ints(TOKENS[self.length], 0),
            lengths=ints(self.length + 1, 0),
            page_table=np.stack([FULL_PAGES, np.zeros_like(FULL_PAGES)]),
            window=self.window(),
            state_slots=ints(ROW_STATE, 99),
        )
        return self._run(self.runner.decode, inputs, 1)

    def _run(self, program, inputs, count: int) -> np.ndarray:
        buffers, logits = program(self.pool.take(), inputs)
        self.pool.put(buffers)
        self.length += count
        return np.asarray(logits)[0]


@pytest.mark.parametrize("chunks", [(16,), (7, 9), (1, 1, 14), (5, 4, 7)])
def test_it_answers_as_the_cold_twin_does_however_the_prompt_is_cut(chunks: tuple[int, ...]) -> None:
    rig = Rig()
    for chunk in chunks:
        logits = rig.extend(chunk)
    assert np.array_equal(logits, cold_logits(TOKENS[:16]))
    for end in range(17, 21):
        assert np.array_equal(rig.decode(), cold_logits(TOKENS[:end]))


@pytest.mark.parametrize(("page_index", "is_read"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_wrong_window_page_shows_if_and_only_if_the_window_reaches_it(page_index: int, is_read: bool) -> None:
    rig = Rig()
    rig.extend(16)
    # The query at 16 sees 11 to 16: pages 2 to 4.
    rig.pool.poison_window(WINDOW_PAGES[page_index : page_index + 1])
    assert np.array_equal(rig.decode(), cold_logits(TOKENS[:17])) != is_read


def test_a_wrong_state_shows_and_stays_wrong() -> None:
    rig = Rig()
    rig.extend(16)
    rig.pool.poison_states(ints(ROW_STATE))
    for end in range(17, 20):
        assert not np.array_equal(rig.decode(), cold_logits(TOKENS[:end]))


def test_a_state_of_another_token_count_shows() -> None:
    rig = Rig()
    rig.extend(8)
    rig.pool.copy_states(ints(ROW_STATE), ints(1))
    rig.extend(8)
    rig.pool.copy_states(ints(1), ints(ROW_STATE))
    assert not np.array_equal(rig.decode(), cold_logits(TOKENS[:17]))


def test_a_snapshot_brings_the_row_back_to_where_it_was_taken() -> None:
    rig = Rig()
    rig.extend(8)
    rig.pool.copy_states(ints(ROW_STATE), ints(1))
    rig.extend(8)
    rig.length = 8
    rig.pool.copy_states(ints(1), ints(ROW_STATE))
    assert np.array_equal(rig.extend(8), cold_logits(TOKENS[:16]))


def test_a_wrong_full_page_shows() -> None:
    rig = Rig()
    rig.extend(16)
    rig.pool.poison(FULL_PAGES[:1])
    assert not np.array_equal(rig.decode(), cold_logits(TOKENS[:17]))
