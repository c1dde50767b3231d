"""The bundled model against logits of an independent float32 implementation, kept in a file. Tolerance 1e-3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from app.models.bundled import find_bundled_model
from app.models.checkpoint import open_checkpoint
from app.models.model_runner import LlamaModelRunner
from app.tpu.kv_pool import MHATokenToKVPool
from app.tpu.mesh import make_mesh
from tests.support.llama_rig import Rows, spec_of

pytestmark = pytest.mark.model

GOLDEN = Path(__file__).parents[2] / "data" / "golden" / "smollm2_q4_1_f32_text220.npz"
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as file:
        return dict(file)


RowsOver = Callable[[int, int], Rows]


@pytest.fixture(scope="module")
def rows_over() -> RowsOver:
    """(page size, tokens) -> one row of the model over a pool of its own. The weights are loaded once."""
    path = find_bundled_model()
    if path is None:
        pytest.skip("the bundled model's package is not installed")
    checkpoint = open_checkpoint(str(path))
    config, mesh = checkpoint.model_config, make_mesh(1, "cpu")
    runner = LlamaModelRunner(config, checkpoint, mesh, spec_of(config, page_size=1, num_pages=1))
    runner.load()

    def open_row(page_size: int, num_tokens: int) -> Rows:
        num_pages = -(-num_tokens // page_size)
        pool = MHATokenToKVPool(spec_of(config, page_size=page_size, num_pages=num_pages + 9), mesh)
        pool.open()
        return Rows(runner, pool, num_rows=1, num_pages=num_pages)

    return open_row


def assert_golden(logits: np.ndarray, golden: dict[str, np.ndarray], index: int) -> None:
    """(vocab,) logits after the token at `index`: the 20 greatest, the sum over all, and which is greatest."""
    np.testing.assert_allclose(logits[golden["top_ids"][index]], golden["top_logits"][index], atol=TOLERANCE)
    wide = logits.astype(np.float64)
    total = np.log(np.exp(wide - wide.max()).sum()) + wide.max()
    np.testing.assert_allclose(total, golden["logsumexp"][index], atol=TOLERANCE)
    assert logits.argmax() == golden["top_ids"][index, 0]


@pytest.mark.parametrize(("chunk_size", "page_size"), [(16, 16), (64, 1), (220, 64)])
def test_chunked_prompt_gives_the_golden_logits(
    rows_over: RowsOver, golden: dict[str, np.ndarray], chunk_size: int, page_size: int
) -> None:
    token_ids = golden["token_ids"]
    rows = rows_over(page_size, 256)
    bucket = max(16, 1 << (chunk_size - 1).bit_length())

    for start in range(0, token_ids.size, chunk_size):
        chunk = token_ids[start : start + chunk_size]
        logits = rows.extend([0], [chunk], [start], num_tokens=bucket, max_chunk=bucket)
        assert_golden(logits[0], golden, start + chunk.size - 1)


def test_decoding_gives_the_golden_logits_at_every_position(rows_over: RowsOver, golden: dict[str, np.ndarray]) -> None:
    token_ids = golden["token_ids"]
    rows = rows_over(16, 256)
    rows.extend([0], [token_ids], [0], num_tokens=256, max_chunk=256)

    # Eleven rows over the same pages, each at a position of its own: each writes there what is there already.
    for first in range(0, token_ids.size, 11):
        positions = range(first, first + 11)
        logits = rows.decode([0] * 11, token_ids[first : first + 11].tolist(), [position + 1 for position in positions])
        for row, position in zip(logits, positions, strict=True):
            assert_golden(row, golden, position)


def test_greedy_continuation_of_a_chat_prompt_is_the_golden_one(
    rows_over: RowsOver, golden: dict[str, np.ndarray]
) -> None:
    prompt = golden["chat_prompt_ids"].astype(np.int32)
    rows = rows_over(16, 64)

    token_ids = [int(rows.extend([0], [prompt], [0], num_tokens=64, max_chunk=64)[0].argmax())]
    while len(token_ids) < golden["chat_greedy_ids"].size:
        logits = rows.decode([0], token_ids[-1:], [prompt.size + len(token_ids)])
        token_ids.append(int(logits[0].argmax()))

    assert token_ids == golden["chat_greedy_ids"].tolist()
