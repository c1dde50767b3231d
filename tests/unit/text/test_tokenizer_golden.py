"""The bundled model's tokenizer against reference token ids."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from app.models.bundled import find_bundled_model
from app.models.checkpoint import open_checkpoint
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import HfTokenizer, load_tokenizer

GOLDEN = Path(__file__).parents[2] / "data" / "golden"
CASES = json.loads((GOLDEN / "smollm2_tokenizer_cases.json").read_text(encoding="utf-8"))

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(find_bundled_model() is None, reason="the bundled model is not installed: make model"),
]


@pytest.fixture(scope="module")
def tokenizer() -> HfTokenizer:
    return load_tokenizer(open_checkpoint(str(find_bundled_model())).folder)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:20].strip())
def test_encoding_equals_the_reference(tokenizer: HfTokenizer, case: dict) -> None:
    assert tokenizer.encode(case["text"]).tolist() == case["token_ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:20].strip())
def test_decoding_gives_the_text_back_at_once_and_in_pieces(tokenizer: HfTokenizer, case: dict) -> None:
    stream = IncrementalDetokenizer(tokenizer).stream(skip_special_tokens=False)

    pieces = [stream.push([token_id]) for token_id in case["token_ids"]]

    assert tokenizer.decode(np.array(case["token_ids"]), skip_special_tokens=False) == case["text"]
    assert "".join(pieces) + stream.flush() == case["text"]


def test_the_chat_template_equals_the_reference(tokenizer: HfTokenizer) -> None:
    golden = np.load(GOLDEN / "smollm2_q4_1_f32_text220.npz")
    question = {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}

    prompt = tokenizer.encode(tokenizer.apply_chat_template([question]))

    np.testing.assert_array_equal(prompt, golden["chat_prompt_ids"])
    assert tokenizer.decode(golden["chat_greedy_ids"]) == "The capital of France is Paris."


def test_end_tokens_and_vocabulary_are_the_models(tokenizer: HfTokenizer) -> None:
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.vocab_size == 49152
