"""Workloads send the same for the same seed, and keep what they share when they are made shorter."""

from __future__ import annotations

import asyncio
import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from app.bench.serve.agent import agent_conversations, fit_to_context
from app.bench.serve.conversation import CHAT, COMPLETIONS, Workload
from app.bench.serve.data_files import CHECKOUT, data_path
from app.bench.serve.ideal import SentTokens, ideal_cached_tokens
from app.bench.serve.mooncake import mooncake_workload
from app.bench.serve.mtbench import SYSTEM_PROMPT, mtbench_workload
from app.bench.serve.settings import WorkloadSettings
from app.bench.trace import BLOCK_TOKENS, read_mooncake_trace
from app.errors import ConfigError

SAMPLE = CHECKOUT / "tests/data/mooncake_sample.jsonl"
RUNS = CHECKOUT / "benchmarks/data/swe_agent"
QUESTIONS = CHECKOUT / "benchmarks/data/mt_bench/question.jsonl"


def mooncake(path: Path = SAMPLE, **changed) -> Workload:
    settings = {
        "num_requests": 60,
        "length_scale": 1 / 16,
        "max_prompt_tokens": None,
        "context_length": 8192,
        "vocab_size": 30_000,
    }
    return mooncake_workload(path, **{**settings, **changed})


def prompts(workload: Workload) -> list[np.ndarray]:
    return [one.turns[0].token_ids for one in workload.conversations]


def common(one, other) -> int:
    size = min(len(one), len(other))
    differing = np.flatnonzero(np.asarray(one[:size]) != np.asarray(other[:size]))
    return int(differing[0]) if differing.size else size


class TestMooncake:
    @pytest.mark.parametrize("scale", [1.0, 1 / 16, 0.037])
    def test_prompts_share_what_their_scaled_trace_blocks_share(self, scale: float) -> None:
        # given
        requests = read_mooncake_trace(SAMPLE, 30)
        kept = max(1, round(BLOCK_TOKENS * scale))

        # when
        sent = prompts(mooncake(num_requests=30, length_scale=scale, context_length=10**6))

        # then every pair shares its common ids times the kept length, and at most a token more by chance
        shared = 0
        for one, other in combinations(range(30), 2):
            num_ids = common(requests[one].block_ids, requests[other].block_ids)
            whole = min(requests[one].input_length, requests[other].input_length) // BLOCK_TOKENS
            assert num_ids <= whole  # the sample shares whole blocks only, so that is exact
            assert 0 <= common(sent[one], sent[other]) - num_ids * kept <= 1
            shared += num_ids
        assert shared > 0

    def test_the_ideal_hit_rate_is_kept_by_scaling(self) -> None:
        # given the trace's own rate: the leading ids that an earlier prompt had, at most all but the last token
        seen: set[tuple[int, ...]] = set()
        hits = total = 0
        for request in read_mooncake_trace(SAMPLE, 60):
            ids = request.block_ids
            whole = (request.input_length - 1) // BLOCK_TOKENS
            hits += BLOCK_TOKENS * max((n for n in range(whole + 1) if n == 0 or ids[:n] in seen), default=0)
            total += request.input_length
            seen.update(ids[:n] for n in range(1, request.input_length // BLOCK_TOKENS + 1))

        # when
        sent = prompts(mooncake(length_scale=1 / 16))
        shared = ideal_cached_tokens([SentTokens(prompt=one, settled=one) for one in sent], page_size=16)

        # then: a rounded partial block at each end is all the difference
        assert hits > 0
        assert sum(shared) / sum(one.size for one in sent) == pytest.approx(hits / total, rel=0.01)

    def test_the_same_settings_make_the_same_requests_and_others_do_not(self) -> None:
        # then
        assert mooncake().digest() == mooncake().digest()
        assert mooncake().digest() != mooncake(length_scale=1 / 8).digest()
        assert mooncake().digest() != mooncake(num_requests=59).digest()
        assert all(0 <= token < 500 for one in prompts(mooncake(vocab_size=500)) for token in one[:50])

    def test_replies_are_scaled_and_times_come_from_the_trace(self) -> None:
        # when
        workload = mooncake()

        # then: the first lines have 500 and 490 output tokens; the eleventh came after 3 s
        assert [one.turns[0].max_tokens for one in workload.conversations[:2]] == [31, 31]
        assert [workload.conversations[place].arrival_s for place in (0, 9, 10)] == [0.0, 0.0, 3.0]
        assert workload.conversations[0].turns[0].path == COMPLETIONS

    def test_long_prompts_are_cut_after_a_whole_block_and_counted(self) -> None:
        # when
        whole, cut = prompts(mooncake()), mooncake(max_prompt_tokens=500)

        # then
        too_long = sum(one.size > 500 for one in whole)
        assert cut.notes == (f"{too_long} of 60 prompts were cut to fit",)
        for before, after in zip(whole, prompts(cut), strict=True):
            assert np.array_equal(after, before[: after.size])
            assert after.size == (before.size if before.size <= 500 else 480)  # 15 times 32

    def test_every_request_fits_the_context(self) -> None:
        # when
        workload = mooncake(context_length=300)

        # then
        sizes = [one.turns[0].token_ids.size + one.turns[0].max_tokens for one in workload.conversations]
        assert max(sizes) <= 300

    @pytest.mark.parametrize(
        ("changed", "field"),
        [({"context_length": 40}, "length_scale"), ({"max_prompt_tokens": 31}, "max_prompt_tokens")],
    )
    def test_a_context_without_room_for_one_block_is_refused(self, changed, field) -> None:
        with pytest.raises(ConfigError, match=rf"{field}=.*room for a prompt of 32 tokens"):
            mooncake(**changed)

    @pytest.mark.parametrize(
        "line",
        [
            "",
            "[]",
            '{"timestamp": 1}',
            '{"timestamp": "x", "input_length": 5, "output_length": 1, "hash_ids": [1]}',
            '{"input_length": 5, "output_length": 1, "hash_ids": [1]}',
            '{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [1]}',
            '{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}',
        ],
    )
    def test_a_file_that_is_no_trace_is_refused_naming_the_field(self, tmp_path, line) -> None:
        path = tmp_path / "trace.jsonl"
        path.write_text(line)
        with pytest.raises(ConfigError, match=r"^data=.*trace"):
            mooncake(path)


class TestAgent:
    def test_every_message_of_the_assistant_is_a_request_with_all_messages_before_it(self) -> None:
        # given
        recorded = {path.stem: json.loads(path.read_text())["messages"] for path in RUNS.glob("*.json")}

        # when
        conversations = agent_conversations(RUNS, max_tokens=16, seed=0, count=None)

        # then
        assert len(conversations) == len(recorded) == 9
        for conversation in conversations:
            messages = recorded[conversation.name]
            expected = [messages[:place] for place, one in enumerate(messages) if one["role"] == "assistant"]
            assert [turn.sent_messages("not used") for turn in conversation.turns] == expected
            assert {(turn.max_tokens, turn.path, turn.ignore_eos) for turn in conversation.turns} == {(16, CHAT, True)}

    def test_the_order_follows_from_the_seed(self) -> None:
        def names(seed: int) -> list[str]:
            return [one.name for one in agent_conversations(RUNS, max_tokens=16, seed=seed, count=4)]

        assert names(1) == names(1)
        assert len({tuple(names(seed)) for seed in range(5)}) > 1

    def test_turns_that_are_too_long_are_left_out_and_counted(self) -> None:
        # given a token for each character
        class Counted:
            async def token_ids(self, messages):
                return [0] * sum(len(one["content"]) for one in messages)

        conversations = agent_conversations(RUNS, max_tokens=16, seed=0, count=None)
        lengths = [sum(len(one.content) for one in turn.messages) + 16 for each in conversations for turn in each.turns]

        # when
        workload = asyncio.run(fit_to_context(conversations, Counted(), 20_000))

        # then
        fitting = sum(length <= 20_000 for length in lengths)
        assert 0 < fitting < len(lengths)
        assert workload.num_requests == fitting
        assert workload.notes[0].startswith(f"{len(lengths) - fitting} of {len(lengths)} turns are left out")
        with pytest.raises(ConfigError, match="not one of"):
            asyncio.run(fit_to_context(conversations, Counted(), 20))

    @pytest.mark.parametrize("content", ["", "[]", '{"messages": [{"role": "user", "content": "x"}]}', "{}"])
    def test_a_file_that_is_no_run_is_refused_by_name(self, tmp_path, content) -> None:
        (tmp_path / "odd.json").write_text(content)
        with pytest.raises(ConfigError, match=r"^data=.*odd\.json"):
            agent_conversations(tmp_path, max_tokens=16, seed=0, count=None)

    def test_a_folder_without_runs_is_refused(self, tmp_path) -> None:
        with pytest.raises(ConfigError, match="a folder of agent runs"):
            agent_conversations(tmp_path, max_tokens=16, seed=0, count=None)


class TestMtBench:
    def test_the_second_turn_holds_what_the_server_answered_to_the_first(self) -> None:
        # given
        asked = {
            f"question-{one['question_id']}": one["turns"]
            for one in map(json.loads, QUESTIONS.read_text().splitlines())
        }

        # when
        workload = mtbench_workload(QUESTIONS, max_tokens=64, seed=0, count=None)

        # then
        assert workload.num_requests == 160
        for conversation in workload.conversations:
            first, second = conversation.turns
            system = {"role": "system", "content": SYSTEM_PROMPT}
            one, other = ({"role": "user", "content": text} for text in asked[conversation.name])
            assert first.sent_messages("") == [system, one]
            answer = {"role": "assistant", "content": "so it is"}
            assert second.sent_messages("so it is") == [system, one, answer, other]
            assert (first.holds_last_reply, second.holds_last_reply) == (False, True)
            assert not first.ignore_eos

    def test_the_order_follows_from_the_seed(self) -> None:
        def digest(seed: int) -> str:
            return mtbench_workload(QUESTIONS, max_tokens=8, seed=seed, count=10).digest()

        assert digest(3) == digest(3)
        assert digest(3) != digest(4)

    @pytest.mark.parametrize(
        "content", ["", "no json", '{"question_id": 1}', '{"question_id": 1, "turns": ["only one"]}']
    )
    def test_a_file_without_questions_is_refused(self, tmp_path, content) -> None:
        path = tmp_path / "questions.jsonl"
        path.write_text(content)
        with pytest.raises(ConfigError, match=r"^data=.*question"):
            mtbench_workload(path, max_tokens=8, seed=0, count=None)


class TestDataPath:
    @pytest.mark.parametrize("workload", ["mooncake", "agent", "mtbench"])
    def test_a_checkout_has_the_data_of_every_workload(self, workload) -> None:
        assert data_path(WorkloadSettings(workload=workload)).exists()

    def test_an_installation_without_the_data_asks_for_its_path(self, tmp_path) -> None:
        with pytest.raises(ConfigError, match="the path of the data of agent"):
            data_path(WorkloadSettings(workload="agent"), checkout=tmp_path)

    def test_a_path_that_was_named_must_exist(self, tmp_path) -> None:
        with pytest.raises(ConfigError, match=r"data=.*nowhere"):
            data_path(WorkloadSettings(workload="agent", data=tmp_path / "nowhere"))
