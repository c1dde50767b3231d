"""A prompt that takes long to tokenise keeps nobody else waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from dependency_injector import providers

from app.server.texts import NUM_THREADS
from app.text.byte_tokenizer import ByteTokenizer
from tests.support.asking import CHAT, Asker, text_of, tokens_of, wait_until
from tests.support.engine import VOCAB_SIZE, cold_tokens
from tests.support.paced_model import PATIENCE_S
from tests.support.server import running_server

BIG = "big"


class StuckTokenizer(ByteTokenizer):
    """Does not come to an end with texts that hold BIG before it is let go."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE)
        self.num_stuck = 0
        self._go = threading.Event()
        self._lock = threading.Lock()

    def let_go(self) -> None:
        self._go.set()

    def encode(self, text: str) -> np.ndarray:
        if BIG in text:
            with self._lock:
                self.num_stuck += 1
            assert self._go.wait(PATIENCE_S), "nobody let the tokenizer go"
        return super().encode(text)


@pytest.fixture
def stuck() -> Iterator[tuple[StuckTokenizer, Asker]]:
    tokenizer = StuckTokenizer()
    with running_server(overrides={"tokenizer": lambda _: providers.Object(tokenizer)}) as server:
        with Asker(server.url) as asker:
            try:
                yield tokenizer, asker
            finally:
                tokenizer.let_go()


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_streams_go_on_to_their_end_while_a_prompt_is_tokenised(stuck: tuple[StuckTokenizer, Asker], path: str) -> None:
    tokenizer, asker = stuck
    big = {"prompt": BIG} if path != CHAT else {"messages": [{"role": "user", "content": BIG}]}
    with ThreadPoolExecutor(1) as pool:
        # given
        waiting = pool.submit(asker.streamed, path, max_tokens=5, **big)
        wait_until(lambda: tokenizer.num_stuck == 1)

        # when: from start to end, text to be tokenised included
        meanwhile = asker.streamed(prompt="small", max_tokens=50)

        # then
        assert meanwhile.choice.text == text_of(cold_tokens(np.array(tokens_of("small"), np.int32), 50))
        assert not waiting.done()
        tokenizer.let_go()
        assert waiting.result().usage["completion_tokens"] == 5


def test_with_every_tokenizer_busy_other_routes_and_token_ids_are_served(
    stuck: tuple[StuckTokenizer, Asker],
) -> None:
    tokenizer, asker = stuck
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        waiting = [pool.submit(asker.whole, prompt=BIG, max_tokens=5) for _ in range(NUM_THREADS)]
        wait_until(lambda: tokenizer.num_stuck == NUM_THREADS)

        assert asker.streamed(prompt=[1, 2, 3], max_tokens=50).usage["completion_tokens"] == 50
        assert asker.http.get("/health").status_code == asker.http.get("/health_generate").status_code == 200
        assert asker.http.post("/flush_cache").status_code == 200

        tokenizer.let_go()
        assert [each.result().usage["completion_tokens"] for each in waiting] == [5] * NUM_THREADS
