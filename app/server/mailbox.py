"""What the engine tells one HTTP request, gathered until its handler looks: a slow reader stops nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from app.scheduling.request import RequestDelta, RequestOutput
from app.server.openai_errors import ApiError
from app.server.parts import CLIENT_FINISH_REASONS, Part


class Mailbox:
    """On the event loop's thread alone. Choices are numbered as in `request_ids`.

    Holds no more than the tokens of its requests, however slowly it is read.
    outputs: the terminal reply of each choice that has ended, by number.
    """

    def __init__(self, request_ids: Sequence[str]) -> None:
        self.request_ids = tuple(request_ids)
        self.outputs: dict[int, RequestOutput] = {}
        self._choices = {request_id: index for index, request_id in enumerate(request_ids)}
        self._deltas: dict[int, list[RequestDelta]] = {}
        self._ended: dict[int, RequestOutput] = {}
        self._num_open = len(self.request_ids)  # choices whose end `next_parts` has not told
        self._refusal: ApiError | None = None
        self._news = asyncio.Event()

    def gained(self, delta: RequestDelta) -> None:
        self._deltas.setdefault(self._choices[delta.request_id], []).append(delta)
        self._news.set()

    def ended(self, output: RequestOutput) -> None:
        index = self._choices[output.request_id]
        self.outputs[index] = self._ended[index] = output
        self._news.set()

    def refused(self, error: ApiError) -> None:
        """One of the choices gets no output. The first error is the one that is told."""
        self._refusal = self._refusal or error
        self._news.set()

    @property
    def has_more(self) -> bool:
        """Whether `next_parts` has more to come."""
        return self._num_open > 0

    async def wait_for_all(self) -> list[RequestOutput]:
        """The terminal replies, by choice. Raises the ApiError if a choice was refused."""
        while len(self.outputs) < len(self.request_ids):
            await self._wait()
        return self.all_outputs()

    def all_outputs(self) -> list[RequestOutput]:
        """The terminal replies, by choice, once all are there."""
        return [self.outputs[index] for index in range(len(self.request_ids))]

    async def next_parts(self) -> list[Part]:
        """What each choice gained since the last call, if it gained anything. Raises like `wait_for_all`."""
        await self._wait()
        deltas, self._deltas = self._deltas, {}
        ended, self._ended = self._ended, {}
        self._num_open -= len(ended)
        return [_part(index, deltas.get(index, []), ended.get(index)) for index in sorted(deltas.keys() | ended.keys())]

    async def _wait(self) -> None:
        await self._news.wait()
        self._news.clear()
        if self._refusal is not None:
            raise self._refusal


def _part(index: int, deltas: list[RequestDelta], output: RequestOutput | None) -> Part:
    """The deltas as one, with the end if that has come."""
    wants_logprobs = bool(deltas) and deltas[0].logprobs is not None
    return Part(
        index=index,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[one for delta in deltas for one in delta.logprobs or ()] if wants_logprobs else None,
        top_logprobs=[one for delta in deltas for one in delta.top_logprobs or ()] if wants_logprobs else None,
        finish_reason=None if output is None else CLIENT_FINISH_REASONS[output.finish_reason],
    )


def whole_part(index: int, output: RequestOutput) -> Part:
    """All of one choice."""
    return Part(
        index=index,
        text=output.text,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        top_logprobs=output.top_logprobs,
        finish_reason=CLIENT_FINISH_REASONS[output.finish_reason],
    )
