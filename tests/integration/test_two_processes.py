"""One engine on two processes, each with a CPU device of its own, over loopback."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.providers.testing import overridden
from tests.support.tiny_gguf import hf_weights, write_gguf
from tests.support.tiny_llama import files_of
from tests.support.two_nodes import MODEL, free_port, nodes, serve, settings

WITHIN_S = 30  # far more than it takes, far less than for ever


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled programs are kept here from one test to the next."""
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def told(folder: Path) -> list[dict[str, Any]]:
    """What each of two nodes tells when it has served the fixed requests."""
    with nodes(folder, *workers(free_port(), "answer")) as pair:
        ended = [node.ended() for node in pair]
    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    return [json.loads(each.out) for each in ended]


def workers(port: int, mode: str) -> list[list[str]]:
    return [["-m", "tests.support.two_nodes", str(rank), str(port), mode] for rank in (0, 1)]


def generate(port: int, model: Path, *extra: Sequence[str]) -> list[list[str]]:
    common = [
        "-m",
        "app",
        "generate",
        "--json",
        "--raw",
        "--ignore-eos",
        "--prompt",
        "hello",
        "--max-tokens",
        "4",
        "--device",
        "cpu",
    ]
    common += ["--model-path", str(model), "--max-total-tokens", "256", "--dist-timeout", "60"]
    common += ["--nnodes", "2", "--tp-size", "2", "--dist-init-addr", f"127.0.0.1:{port}"]
    return [[*common, "--node-rank", str(rank), *extra[rank]] for rank in (0, 1)]


def test_two_nodes_answer_as_one_process_and_plan_every_step_alike(told: list[dict[str, Any]]) -> None:
    """Field report H14: ranks that plan from what each has free enter a step with batches a page apart and stall.

    Here nothing that is planned depends on a device: two schedulers that were told the same plan the same.
    """
    with overridden(settings(), **files_of(MODEL, seed=1)) as container:
        alone = serve(container)

    for node in told:
        assert node["errors"] == [None] * 4
        assert node["tokens"] == alone["tokens"]
        assert node["cached"] == alone["cached"]
        assert node["plans"] == alone["plans"]
        assert node["ledger"] == alone["ledger"]
        np.testing.assert_allclose(node["logprobs"][0], alone["logprobs"][0], atol=1e-4)
    assert sum(alone["cached"]) > 0


def test_each_node_holds_its_shard_of_one_pool_and_writes_it_in_place(told: list[dict[str, Any]]) -> None:
    assert [each["tp_rank"] for each in told] == [0, 1]
    for each in told:
        assert (each["num_nodes"], each["own_shards"]) == (2, 1)
        assert each["same_place"]
        assert each["old_deleted"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_node_that_is_killed_takes_the_other_with_it_and_the_other_says_why(
    folder: Path, port: int, victim: int
) -> None:
    # given: both are serving
    with nodes(folder, *workers(port, "endless")) as pair:
        for node in pair:
            node.wait_for_output()

        # when
        pair[victim].kill()

        # then
        survivor = pair[1 - victim].ended(WITHIN_S)
    # jax aborts a process whose node 0 is gone; ours is nearly always quicker.
    codes, reasons = {1}, [f"tpukv: error: node {victim} is gone", "tpukv: error: .* lies on 2 nodes"]
    if victim == 0:
        codes |= {-signal.SIGABRT}
        reasons.append("another task died")
    assert survivor.code in codes
    assert re.search("|".join(reasons), survivor.err)


def test_the_command_runs_on_two_nodes_and_prints_nothing_but_the_answer(folder: Path, port: int) -> None:
    model = write_gguf(folder / "tiny.gguf", hf_weights())

    with nodes(folder, *generate(port, model, [], [])) as pair:
        ended = [node.ended() for node in pair]

    assert [each.code for each in ended] == [0, 0], ended[0].err + ended[1].err
    first, second = (json.loads(each.out) for each in ended)
    assert first == second
    assert len(first["outputs"][0]["token_ids"]) == 4


def test_nodes_with_different_settings_are_refused_on_both_with_the_flag(folder: Path, port: int) -> None:
    commands = generate(port, folder / "no-model-is-opened", ["--page-size", "8"], ["--page-size", "16"])

    with nodes(folder, *commands) as pair:
        ended = [node.ended() for node in pair]

    for each in ended:
        assert each.code == 2
        assert "all nodes get the same --page-size; node 0 has 8 and node 1 16" in each.err
        assert each.out == ""


def test_the_server_refuses_several_nodes(folder: Path) -> None:
    several = ["--nnodes", "2", "--tp-size", "2", "--max-total-tokens", "256", "--dist-init-addr", "127.0.0.1:9"]

    with nodes(folder, ["-m", "app", "serve", "--port", "0", *several]) as [server]:
        ended = server.ended(WITHIN_S)

    assert ended.code == 2
    assert "--nnodes=2 is not allowed: 1; tpukv serve runs in one process for now" in ended.err
