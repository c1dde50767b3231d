"""What a prefix cache without limit would reuse, serving the same prompts one at a time in the order they were sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SentTokens:
    """prompt: (prompt tokens,) int32. settled: (tokens,) int32, what has keys and values once the reply has ended,
    as far as it is known: the prompt, and after it the reply without its last token."""

    prompt: np.ndarray
    settled: np.ndarray


def ideal_cached_tokens(sent: Sequence[SentTokens], page_size: int) -> list[int]:
    """For each prompt the tokens it shares, in whole pages, with the beginning of something settled before it.

    The last token of a prompt is always computed. O(all tokens): a trie whose edges are pages.
    """
    children: dict[tuple[int, bytes], int] = {}
    shared = []
    for one in sent:
        node, depth = 0, 0
        for page in _pages(one.prompt[:-1], page_size):
            found = children.get((node, page))
            if found is None:
                break
            node, depth = found, depth + 1
        shared.append(depth * page_size)
        node = 0
        for page in _pages(one.settled, page_size):
            node = children.setdefault((node, page), len(children) + 1)
    return shared


def settled_tokens(prompt: np.ndarray, next_prompt: np.ndarray | None, completion_tokens: int) -> np.ndarray:
    """`prompt` and the reply without its last token, where the conversation's next prompt goes on with that reply.

    The reply's tokens are read from the next prompt: the server is not asked for them. They are those of its text,
    which may be spelt in other tokens than the model chose; then the ideal is a little more than can be reached.
    """
    if next_prompt is None or completion_tokens < 1 or not np.array_equal(next_prompt[: prompt.size], prompt):
        return prompt
    return next_prompt[: prompt.size + completion_tokens - 1]


def _pages(token_ids: np.ndarray, page_size: int) -> list[bytes]:
    data = np.ascontiguousarray(token_ids, np.int32).tobytes()
    step = 4 * page_size
    return [data[start : start + step] for start in range(0, len(data) - step + 1, step)]
