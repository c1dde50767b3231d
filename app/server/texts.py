"""Tokenising beside the event loop: a prompt of megabytes takes seconds, and streams must not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from app.core.ports import Tokenizer

Result = TypeVar("Result")
NUM_THREADS = 2


class Texts:
    """Calls of the tokenizer, on threads of their own. The tokenizer lets other threads run meanwhile."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")

    async def encode(self, text: str) -> np.ndarray:
        """(num_tokens,) int32. RequestError for text that is no Unicode."""
        return await self.run(lambda: self._tokenizer.encode(text))

    async def encode_chat(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> np.ndarray:
        """The tokens of a conversation. RequestError when the model's template refuses it."""

        def rendered() -> np.ndarray:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)
            return self._tokenizer.encode(text)

        return await self.run(rendered)

    async def decode(self, token_ids: list[int]) -> str:
        return await self.run(lambda: self.preview(token_ids))

    def preview(self, token_ids: list[int]) -> str:
        """A few tokens as text, here and now."""
        return self._tokenizer.decode(np.array(token_ids, np.int32), skip_special_tokens=False)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Anything else that takes long for a large request."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """End the threads; what has not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
