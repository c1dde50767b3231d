"""One node of an engine on two: run twice, as processes of their own. Prints one JSON object a line.

python -m tests.support.two_nodes RANK PORT answer     serve a fixed set of requests, tell everything, end
python -m tests.support.two_nodes RANK PORT endless    the same, then one request after another until killed
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.commands.nodes.joining import joined
from app.config.server_args import ServerArgs
from app.core.sampling import SamplingParams
from tests.support.tiny_llama import files_of, tiny_llama

ROOT = Path(__file__).parents[2]
HARD_LIMIT_S = 100
MODEL = tiny_llama(vocab_size=64, hidden_size=32, intermediate_size=64, num_heads=4, num_kv_heads=2, context_length=64)


def settings(**fields: Any) -> ServerArgs:
    """Small enough that eviction and waiting happen."""
    sizes = {"page_size": 8, "max_total_tokens": 96, "max_running_requests": 2, "chunked_prefill_size": 16}
    return ServerArgs(**{**sizes, "device": "cpu", "check_invariants": True, **fields})


def requests() -> list[Any]:
    """Shared prefixes, chunks, and every kind of sampling: greedy, seeded, penalised, with log-probabilities."""
    from app.scheduling.request import Request

    rng = np.random.default_rng(0)
    shared = rng.integers(0, 64, 24).astype(np.int32)
    kinds: list[dict[str, Any]] = [
        {"logprobs": 2},
        {"temperature": 0.7, "seed": 5},
        {"repetition_penalty": 1.3, "logit_bias": {7: 2.0}},
        {},
    ]
    return [
        Request(
            request_id=str(number),
            prompt_token_ids=np.concatenate([shared[: 8 * number], rng.integers(0, 64, 5).astype(np.int32)]),
            sampling=SamplingParams(max_tokens=6, ignore_eos=True, **kind),
        )
        for number, kind in enumerate(kinds)
    ]


def serve(container: Any) -> dict[str, Any]:
    """-> what was answered, what was planned in every step, and where the pool's arrays lie."""
    import jax

    from app.scheduling.engine import generate_all
    from tests.support.engine import RuntimeSpy

    runtime, pool = container.runtime(), container.device_pool()
    spy = RuntimeSpy(runtime)
    before = pool.take()
    pool.put(before)
    places = [_places(array) for array in jax.tree.leaves(before)]
    outputs = generate_all(container.scheduler(), requests())
    after = pool.take()
    pool.put(after)
    container.scheduler().check_integrity()
    runtime.check_integrity()
    return {
        "tokens": [output.token_ids for output in outputs],
        "cached": [output.cached_tokens for output in outputs],
        "logprobs": [output.logprobs or [] for output in outputs],
        "errors": [output.error for output in outputs],
        "plans": [digest(plan) for plan in spy.plans],
        "ledger": container.scheduler().ledger(),
        "tp_rank": container.tp_rank(),
        "num_nodes": pool.num_nodes,
        "own_shards": len(jax.tree.leaves(after)[0].addressable_shards),
        "same_place": places == [_places(array) for array in jax.tree.leaves(after)],
        "old_deleted": all(array.is_deleted() for array in jax.tree.leaves(before)),
    }


def _places(array: Any) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def digest(plan: Any) -> str:
    """Of all that a plan says about rows, lengths, prefixes, frees and tokens; not of whose runtime it is for."""
    numbers = [plan.free_pages, plan.release_slots, plan.decode_slots, plan.decode_positions]
    numbers += [plan.extend_slots, plan.extend_starts, plan.extend_lengths, plan.extend_token_ids, plan.extend_samples]
    numbers += [admission.prefix_pages for admission in plan.admissions]
    return hashlib.sha256(repr([np.asarray(each).tolist() for each in numbers]).encode()).hexdigest()


def main(rank: int, port: int, mode: str) -> None:
    args = settings(tp_size=2, nnodes=2, node_rank=rank, dist_init_addr=f"127.0.0.1:{port}", dist_timeout=60)
    with joined(args):
        from app.providers.testing import overridden
        from app.scheduling.engine import generate_all
        from app.scheduling.request import Request

        with overridden(args, **files_of(MODEL, seed=1)) as container:
            if mode == "answer":
                print(json.dumps(serve(container)), flush=True)
                return
            for number in count():
                request = Request(
                    request_id=str(number),
                    prompt_token_ids=np.arange(5, dtype=np.int32),
                    sampling=SamplingParams(max_tokens=20, ignore_eos=True),
                )
                [output] = generate_all(container.scheduler(), [request])
                if number == 0:
                    print(json.dumps({"tokens": output.token_ids}), flush=True)


def free_port() -> int:
    """A port that is free now, and so is the one after it."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            number = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", number + 1))
            except (OSError, OverflowError):
                continue
            return number


class Ended(NamedTuple):
    """A node that has ended."""

    code: int
    out: str
    err: str


class Node:
    """One process, with its output in files."""

    def __init__(self, command: Sequence[str], folder: Path, name: str) -> None:
        self._out, self._err = folder / f"{name}.out", folder / f"{name}.err"
        cached = {"JAX_COMPILATION_CACHE_DIR": str(folder), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        own = {"JAX_PLATFORMS": "cpu", "TPUKV_CACHE_DIR": str(folder / "cache")}
        environment = {**cached, **os.environ, **own}  # where tests keep what they compile, so does a node
        with self._out.open("w") as out, self._err.open("w") as err:
            self._process = subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=out, stderr=err, stdin=subprocess.DEVNULL
            )

    def wait_for_output(self) -> None:
        """Until it has written its first line."""
        deadline = time.monotonic() + HARD_LIMIT_S
        while "\n" not in self._out.read_text():
            assert self._process.poll() is None, self._err.read_text()
            assert time.monotonic() < deadline, "no output"
            time.sleep(0.05)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def ended(self, within_s: float = HARD_LIMIT_S) -> Ended:
        code = self._process.wait(within_s)
        return Ended(code, self._out.read_text(), self._err.read_text())


@contextmanager
def nodes(folder: Path, *commands: Sequence[str]) -> Iterator[list[Node]]:
    """One process a command; none outlives the block."""
    started: list[Node] = []
    try:
        for number, command in enumerate(commands):
            started.append(Node(command, folder, f"node{number}"))
        yield started
    finally:
        for node in started:
            node.kill()
            node.ended()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
