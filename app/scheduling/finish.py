"""When a request ends by its tokens, and what it is told: deltas while it runs, the reply at its end."""

from __future__ import annotations

import numpy as np

from app.core.ports import Detokenizer
from app.scheduling.request import FinishReason, RequestDelta, RequestOutput, Sequence
from app.scheduling.watched_text import WatchedText
from app.text.stop_strings import StopChecker


class FinishRule:
    """End-of-sequence ids, stop ids, stop strings; text is made here and nowhere else."""

    def __init__(self, *, eos_token_ids: tuple[int, ...], detokenizer: Detokenizer) -> None:
        self._eos = eos_token_ids
        self._detokenizer = detokenizer

    def may_end(self, token_ids: np.ndarray) -> np.ndarray:
        """(n,) bool: tokens that end most requests, so that `reason` must be asked. A few comparisons for any n."""
        mask = np.zeros(token_ids.size, np.bool_)
        for eos in self._eos:
            mask |= token_ids == eos
        return mask

    def reason(self, sequence: Sequence) -> FinishReason | None:
        """Whether the last output token ends the sequence. Once for each token of a watched sequence, in order."""
        params = sequence.sampling
        token = sequence.output[-1]
        due = len(sequence.output) >= params.min_tokens
        if due and (token in params.stop_token_ids or (token in self._eos and not params.ignore_eos)):
            return "stop"  # before its text is looked at: it has none
        if (params.stop or sequence.request.streams) and self._stop_string_found(sequence, token, due):
            return "stop"
        return None

    def delta(self, sequence: Sequence) -> RequestDelta:
        """What a streamed sequence gained since the last call. After `reason`, or after `output` for the rest."""
        sent, sequence.sent = sequence.sent, len(sequence.output)
        wants_logprobs = sequence.sampling.logprobs is not None
        return RequestDelta(
            request_id=sequence.request_id,
            text="" if sequence.text is None else sequence.text.take(),
            token_ids=sequence.output[sent:],
            logprobs=sequence.logprobs[sent:] if wants_logprobs else None,
            top_logprobs=sequence.top_logprobs[sent:] if wants_logprobs else None,
        )

    def output(self, sequence: Sequence, reason: FinishReason, error: str | None) -> RequestOutput:
        wants_logprobs = sequence.sampling.logprobs is not None
        return RequestOutput(
            request_id=sequence.request_id,
            text=self._text(sequence, reason),
            token_ids=sequence.output,
            prompt_tokens=sequence.prompt.size,
            cached_tokens=sequence.cached_tokens or 0,
            restored_tokens=sequence.restored_tokens,
            finish_reason=reason,
            first_token_ns=sequence.first_token_ns,
            logprobs=sequence.logprobs if wants_logprobs else None,
            top_logprobs=sequence.top_logprobs if wants_logprobs else None,
            error=error,
        )

    def _stop_string_found(self, sequence: Sequence, token: int, due: bool) -> bool:
        """Take the token into the sequence's text; before `due` its text is not searched."""
        if sequence.text is None:
            stream = self._detokenizer.stream(skip_special_tokens=sequence.sampling.skip_special_tokens)
            sequence.text = WatchedText(stream, StopChecker(sequence.sampling.stop))
        return sequence.text.push(token, due)

    def _text(self, sequence: Sequence, reason: FinishReason) -> str:
        if sequence.text is not None:
            return sequence.text.finish()
        output = sequence.output[:-1] if reason == "stop" else sequence.output
        stream = self._detokenizer.stream(skip_special_tokens=sequence.sampling.skip_special_tokens)
        return stream.push(output) + stream.flush()
