"""An engine over the fake model, and what its outputs must be.

`cold_tokens` computes in numpy what `FakeModelRunner` answers when nothing is cached, chunked, shared or retracted: the
cold twin of every greedy request, without an engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from app.config.server_args import ServerArgs
from app.core.keys import DEFAULT_NAMESPACE, Namespace
from app.core.sampling import SamplingParams
from app.providers.testing import Override, overridden
from app.scheduling.request import FinishReason, Request, RequestOutput
from app.text.byte_tokenizer import END_OF_SEQUENCE
from app.tpu.cpu_fake import LOGIT_SCALE, fake_model_config

VOCAB_SIZE = 257
CONTEXT_LENGTH = 128


@dataclass
class Engine:
    """A container's parts, and the replies received so far, by request id."""

    container: Any
    scheduler: Any
    runtime: Any
    adapter: Any
    args: ServerArgs
    outputs: dict[str, RequestOutput] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)

    def add(
        self,
        prompt: Iterable[int],
        request_id: str | None = None,
        namespace: Namespace = DEFAULT_NAMESPACE,
        priority: int = 0,
        streams: bool = False,
        **sampling: Any,
    ) -> str:
        """Queue a request. It ignores eos unless told otherwise."""
        request_id = request_id or f"r{len(self.requests)}"
        request = Request(
            request_id=request_id,
            prompt_token_ids=np.array(list(prompt), np.int32),
            sampling=SamplingParams(**{"ignore_eos": True, **sampling}),
            namespace=namespace,
            priority=priority,
            streams=streams,
        )
        self.scheduler.add(request)
        self.requests[request_id] = request
        self.outputs.pop(request_id, None)
        return request_id

    def step(self, times: int = 1) -> list[RequestOutput]:
        """-> what ended. A request that is answered twice fails the test."""
        ended = []
        for _ in range(times):
            for output in self.scheduler.step():
                assert output.request_id not in self.outputs, f"{output.request_id} was answered twice"
                self.outputs[output.request_id] = output
                ended.append(output)
        return ended

    def drain(self, max_steps: int | None = None) -> dict[str, RequestOutput]:
        """Step until there is nothing to do. Not getting there is a hang: a failure. -> every reply so far."""
        if max_steps is None:
            tokens = sum(each.prompt_token_ids.size + each.sampling.max_tokens for each in self.requests.values())
            max_steps = 20 + 2 * tokens
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return self.outputs
            self.step()
        running, waiting = self.scheduler.num_running, self.scheduler.num_waiting
        raise AssertionError(f"no end after {max_steps} steps: {running} running, {waiting} waiting")

    def serve(self, prompt: Iterable[int], **sampling: Any) -> RequestOutput:
        """One request, from start to end."""
        request_id = self.add(prompt, **sampling)
        return self.drain()[request_id]

    def check(self) -> None:
        """Every invariant of every owner."""
        self.scheduler.check_integrity()
        self.runtime.check_integrity()

    def check_idle(self) -> None:
        """Nothing runs, nothing waits, and every page is free or cached without a lock."""
        assert not self.scheduler.has_work()
        self.check()
        ledger = self.scheduler.ledger()
        assert ledger["requests"] == ledger["cached_protected"] == 0, ledger
        assert self.container.req_to_token_pool().num_free == self.args.max_running_requests

    def check_replies(self) -> None:
        """Each request was answered once, and as its cold twin would have been."""
        assert self.outputs.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            check_reply(self.outputs[request_id], request, self.context_length)

    @property
    def context_length(self) -> int:
        return int(self.container.model_config().context_length)

    @property
    def cached_pages(self) -> int:
        ledger = self.scheduler.ledger()
        return ledger["cached_evictable"] + ledger["cached_protected"]

    def poison_free_pages(self) -> None:
        """Fill every page and snapshot that nobody owns with a marker. No output may ever depend on it."""
        pool = self.container.device_pool()
        pool.poison(_loose(self.adapter.ledger(), self.adapter.capacity))
        if self.adapter.window_ledger():
            pool.poison_window(_loose(self.adapter.window_ledger(), self.container.window_allocator().capacity))
        if self.adapter.snapshot_ledger():
            loose = _loose(self.adapter.snapshot_ledger(), self.container.state_allocator().capacity)
            if loose.any():  # slot 0 of the states is read, so what is left over goes to a loose one again
                pool.poison_states(np.where(loose == 0, loose[0], loose))


def _loose(ledger: dict[str, np.ndarray], capacity: int) -> np.ndarray:
    """(capacity,) int32: what nobody owns. One shape for any number: 0 takes the rest, as nothing reads page 0."""
    pages = np.concatenate([ledger["free"], ledger["recorded"]])
    padded = np.zeros(capacity, np.int32)
    padded[: pages.size] = pages
    return padded


def server_args(**fields: Any) -> ServerArgs:
    """Small pages, small chunks, few rows, every check on."""
    defaults = {
        "page_size": 4,
        "max_total_tokens": 256,
        "chunked_prefill_size": 16,
        "max_running_requests": 4,
        "check_invariants": True,
        "cache_type": "radix_cache",
    }
    return ServerArgs(**{**defaults, **fields})


@contextmanager
def opened(
    *,
    context_length: int = CONTEXT_LENGTH,
    window: int | None = None,
    recurrent: bool = False,
    overrides: dict[str, Override] | None = None,
    **fields: Any,
) -> Iterator[Engine]:
    """An engine over the fake model; `fields` are those of ServerArgs. Checked when the block is left without error.

    window, recurrent: what the model has beside a layer of full attention.
    """
    args = server_args(**fields)
    model = fake_model_config(vocab_size=VOCAB_SIZE, context_length=context_length, window=window, recurrent=recurrent)
    with overridden(args, fake=True, model=model, **(overrides or {})) as container:
        engine = Engine(
            container=container,
            scheduler=container.scheduler(),
            runtime=container.runtime(),
            adapter=container.scheduler_adapter(),
            args=args,
        )
        yield engine
        engine.drain()
        engine.check_idle()


def cold_tokens(prompt: np.ndarray, count: int) -> list[int]:
    """The first `count` greedy tokens after `prompt`, (n,) int32."""
    chain = _Chain(prompt)
    return [chain.choose() for _ in range(count)]


def cold_logits(tokens: np.ndarray) -> np.ndarray:
    """(VOCAB_SIZE,) float32: what the fake model says after `tokens`, (n,) int32."""
    return _Chain(tokens).logits()


def cold_reply(request: Request, context_length: int = CONTEXT_LENGTH) -> tuple[list[int], FinishReason]:
    """Tokens and end of a greedy request without stop strings."""
    params = request.sampling
    chain = _Chain(request.prompt_token_ids)
    output: list[int] = []
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {END_OF_SEQUENCE})
    limit = min(params.max_tokens, context_length - request.prompt_token_ids.size)
    while len(output) < limit:
        output.append(chain.choose())
        if output[-1] in ends and len(output) >= params.min_tokens:
            return output, "stop"
    return output, "length"


def check_reply(output: RequestOutput, request: Request, context_length: int = CONTEXT_LENGTH) -> None:
    """The reply equals the cold twin's, as far as it goes when the request was aborted or ran out of memory."""
    tokens, reason = cold_reply(request, context_length)
    prompt_tokens = request.prompt_token_ids.size
    assert output.prompt_tokens == prompt_tokens
    assert 0 <= output.cached_tokens <= prompt_tokens - 1
    if output.finish_reason in ("abort", "capacity", "error"):
        assert output.token_ids == tokens[: len(output.token_ids)]
    else:
        assert (output.token_ids, output.finish_reason) == (tokens, reason)


class _Chain:
    """The state of FakeModelRunner for one row: the last content, and the sum over all of them."""

    def __init__(self, tokens: np.ndarray) -> None:
        positions = np.arange(tokens.size)
        contents = np.cumsum(_mix(tokens, positions), dtype=np.uint32)
        self._last = int(contents[-1])
        self._sum = int(_mix(contents, positions).sum(dtype=np.uint32))
        self._length = int(tokens.size)

    def logits(self) -> np.ndarray:
        bits = _mix(np.uint32(self._sum), np.arange(VOCAB_SIZE)) >> np.uint32(8)
        return bits.astype(np.float32) * np.float32(LOGIT_SCALE / 2**24)

    def choose(self) -> int:
        token = int(self.logits().argmax())
        self._last = (self._last + int(_mix(token, self._length))) % 2**32
        self._sum = (self._sum + int(_mix(np.uint32(self._last), self._length))) % 2**32
        self._length += 1
        return token


def _mix(value: Any, position: Any) -> np.ndarray:
    """As in cpu_fake: MurmurHash3's finaliser, modulo 2**32."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(value, np.uint32) * np.uint32(0x9E3779B1)
        mixed = mixed + np.asarray(position, np.uint32) * np.uint32(0x85EBCA77)
        mixed = (mixed ^ (mixed >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        mixed = (mixed ^ (mixed >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return mixed ^ (mixed >> np.uint32(16))


class RuntimeSpy:
    """Keeps what crosses the boundary of a runtime, and refuses prepares when it is told to."""

    def __init__(self, runtime: Any) -> None:
        self.calls: list[str] = []
        self.plans: list[Any] = []  # of prepares that were not refused
        self.prepared: list[Any] = []
        self.refusals: list[Exception] = []  # one for each of the next prepares
        self._prepare, self._execute = runtime.prepare_batch, runtime.execute_batch
        runtime.prepare_batch, runtime.execute_batch = self.prepare_batch, self.execute_batch

    def prepare_batch(self, plan: Any) -> Any:
        self.calls.append("prepare")
        if self.refusals:
            raise self.refusals.pop(0)
        prepared = self._prepare(plan)
        self.plans.append(plan)
        self.prepared.append(prepared)
        return prepared

    def execute_batch(self, prepared: Any) -> Any:
        self.calls.append("execute")
        return self._execute(prepared)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that were dispatched."""
        return sum(int(plan.extend_lengths.sum()) for plan in self.plans)
