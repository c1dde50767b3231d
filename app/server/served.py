"""What one server serves: facts that stay the same from start to end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from app.errors import RequestError
from app.scheduling.limits import SchedulerLimits
from app.scheduling.request import Request
from app.server.openai_errors import unknown_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """model: the name clients ask for. created: seconds since 1970. facts: what was chosen and why."""

    model: str
    created: int
    limits: SchedulerLimits
    pool_tokens: int
    facts: dict[str, Any]

    @property
    def context_length(self) -> int:
        return self.limits.context_length

    def check_model(self, asked: str | None) -> None:
        """ApiError (404) for another model. None and the empty string ask for whatever is served."""
        if asked and asked != self.model:
            raise unknown_model(asked, self.model)

    def check(self, request: Request) -> None:
        """RequestError for a request that can never be served."""
        self.limits.check(request, pool_tokens=self.pool_tokens)

    def check_token_ids(self, token_ids: list[int]) -> np.ndarray:
        """(n,) int32 of a client's list. RequestError for an id that no token has."""
        array = np.array(token_ids, np.int64)
        outside = array[(array < 0) | (array >= self.limits.vocab_size)]
        if outside.size:
            raise RequestError(
                field="prompt_token_ids",
                value=int(outside[0]),
                allowed=f"token ids of 0 to {self.limits.vocab_size - 1}",
            )
        return array.astype(np.int32)
