"""`generate` and `demo` with a small fake engine: which prompts reach it, and what is printed."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from app.caches.tiers.ports import RestoredTokens
from app.commands import demo, generate
from app.commands.demo_prompts import QUESTIONS, SYSTEM_PROMPT
from app.commands.engine import Engine, Prompt
from app.commands.generate import GenerateArgs
from app.config.cache_type import CacheTypeChoice
from app.config.server_args import ServerArgs
from app.core.sampling import SamplingParams
from app.errors import CacheTypeConflictError, ConfigError, RequestError
from app.scheduling.request import RequestOutput


class FakeEngine:
    """Answers each prompt with itself in capitals, one token a character. Remembers what it was asked."""

    def __init__(self, errors: Sequence[str | None] = (), refuses: bool = False) -> None:
        self.cache = CacheTypeChoice("radix_cache", "because")
        self.has_tiers = False
        self.asked: list[tuple[list[Prompt], SamplingParams]] = []
        self.settings: ServerArgs | None = None
        self.is_open = False
        self._errors = iter(errors)
        self._refuses = refuses

    def answer(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RequestOutput]:
        assert self.is_open
        if self._refuses:
            raise RequestError(field="prompt", value="9 tokens", allowed="at most 8")
        self.asked.append((list(prompts), sampling))
        return [self._output(prompt, sampling) for prompt in prompts]

    def check_ledger(self) -> dict[str, int]:
        assert self.is_open
        return {"free": 3, "cached": 4}

    @contextlib.contextmanager
    def opening(self, settings: ServerArgs) -> Iterator[Engine]:
        self.settings = settings
        self.is_open = True
        try:
            yield self
        finally:
            self.is_open = False

    @property
    def texts(self) -> list[str]:
        return [prompt.text for prompts, _ in self.asked for prompt in prompts]

    def _output(self, prompt: Prompt, sampling: SamplingParams) -> RequestOutput:
        text = prompt.text.upper()[: sampling.max_tokens]
        error = next(self._errors, None)
        return RequestOutput(
            request_id="r",
            text=text,
            token_ids=list(range(len(text))),
            prompt_tokens=len(prompt.text),
            cached_tokens=len(self.asked) - 1,
            finish_reason="stop" if error is None else "capacity",
            first_token_ns=2_500_000,
            error=error,
            restored_tokens=RestoredTokens(host=min(2, len(self.asked) - 1)),
        )


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def generate_with(engine: FakeEngine, stdin: bytes = b"", **settings: Any) -> int:
    code = generate.run(GenerateArgs(**settings), engine.opening, io.BytesIO(stdin))
    assert not engine.is_open
    return code


# -- where prompts come from -----------------------------------------------------------------------------------------


def test_prompts_come_from_the_command_line_then_from_the_file(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("third\n")

    assert generate_with(engine, b"not read", prompt=("first", "sec\nond"), prompt_file=file) == 0

    assert engine.texts == ["first", "sec\nond", "third"]


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"\n\none\n  \n two \n", ["one", " two "]),
        ("\ufeffgr\u00fc\u00df\u2028dich\n".encode(), ["gr\u00fc\u00df\u2028dich"]),
    ],
)
def test_a_text_file_and_stdin_have_one_prompt_a_line(
    engine: FakeEngine, tmp_path: Path, text: bytes, prompts: list[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(text)

    generate_with(engine, prompt_file=file)
    generate_with(engine, text)

    assert engine.texts == prompts * 2


def test_a_jsonl_file_has_prompts_of_any_shape(engine: FakeEngine, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "two\\nlines", "id": 7}\n\n{"prompt": "\\u00fc"}\n')

    generate_with(engine, prompt_file=file)

    assert engine.texts == ["two\nlines", "\u00fc"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("p.txt", b"", "it needs at least one prompt, one a line"),
        ("p.txt", b" \n\n", "it needs at least one prompt, one a line"),
        ("p.txt", b"good\nbad \xff\n", "line 2 is not valid UTF-8"),
        ("p.jsonl", b'{"prompt": "x"}\nplain\n', 'line 2 is not {"prompt": "some text"}'),
        ("p.jsonl", b'{"prompt": 3}\n', 'line 1 is not {"prompt": "some text"}'),
        ("p.jsonl", b'["prompt"]\n', 'line 1 is not {"prompt": "some text"}'),
        ("p.jsonl", b"[" * 100_000, 'line 1 is not {"prompt": "some text"}'),
        ("p.jsonl", b"\n", "it needs at least one prompt, one a line"),
    ],
)
def test_a_file_without_good_prompts_is_refused_before_an_engine_opens(
    engine: FakeEngine, tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        generate_with(engine, prompt_file=file)

    assert str(caught.value) == f"--prompt-file={str(file)!r} is not allowed: {reason}"
    assert engine.settings is None


@pytest.mark.parametrize(
    ("settings", "stdin", "message"),
    [
        ({}, b"", "standard input='' is not allowed: it needs at least one prompt, one a line"),
        ({}, b"\xff", "standard input='' is not allowed: line 1 is not valid UTF-8"),
        ({"prompt": ("x", "")}, b"", "--prompt='' is not allowed: a prompt needs at least one character"),
        ({"prompt": ("\udcff",)}, b"", "--prompt='\\udcff' is not allowed: text that is valid UTF-8"),
        ({"prompt": ("x",), "system": "\udcff"}, b"", "--system='\\udcff' is not allowed: text that is valid UTF-8"),
    ],
)
def test_missing_empty_and_unreadable_prompts_are_refused_before_an_engine_opens(
    engine: FakeEngine, settings: dict[str, Any], stdin: bytes, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        generate_with(engine, stdin, **settings)

    assert str(caught.value) == message
    assert engine.settings is None


def test_a_file_that_cannot_be_read_is_refused_with_the_reason(engine: FakeEngine, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be read: No such file or directory"):
        generate_with(engine, prompt_file=tmp_path / "missing")
    with pytest.raises(ConfigError, match="it cannot be read: Is a directory"):
        generate_with(engine, prompt_file=tmp_path)


# -- what reaches the engine -----------------------------------------------------------------------------------------


def test_prompts_are_served_together_with_system_and_settings(engine: FakeEngine) -> None:
    generate_with(engine, prompt=("a", "b"), system="be brief", server=ServerArgs(page_size=4), max_tokens=7)

    assert engine.asked == [
        ([Prompt("a", "be brief", False), Prompt("b", "be brief", False)], SamplingParams(max_tokens=7))
    ]
    assert engine.settings == ServerArgs(page_size=4)


def test_raw_prompts_are_marked_and_take_no_system_message(engine: FakeEngine) -> None:
    generate_with(engine, prompt=("a",), raw=True)
    with pytest.raises(CacheTypeConflictError, match=r"--system='s' cannot be combined with --raw=True"):
        generate_with(engine, prompt=("a",), raw=True, system="s")

    assert engine.asked[0][0] == [Prompt("a", None, True)]


def test_sampling_defaults_are_those_of_the_engine() -> None:
    assert GenerateArgs(prompt=("x",)).sampling() == SamplingParams()


def test_every_sampling_flag_reaches_the_engine(engine: FakeEngine) -> None:
    chosen: dict[str, Any] = {
        "max_tokens": 9,
        "min_tokens": 2,
        "ignore_eos": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 11,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.1,
        "stop": ("a", "b"),
        "stop_token_ids": (1, 2),
    }

    generate_with(engine, prompt=("x",), **chosen)

    assert engine.asked[0][1] == SamplingParams(**chosen)


def test_bad_sampling_is_refused_before_an_engine_opens(engine: FakeEngine) -> None:
    with pytest.raises(RequestError, match="temperature=-1"):
        generate_with(engine, prompt=("x",), temperature=-1.0)

    assert engine.settings is None


# -- what is printed -------------------------------------------------------------------------------------------------


def test_json_is_one_object_with_the_outputs_in_order(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate_with(engine, prompt=("gr\u00fcn", "blau"), json=True) == 0

    assert json.loads(capsys.readouterr().out) == {
        "outputs": [
            {
                "text": "GR\u00dcN",
                "token_ids": [0, 1, 2, 3],
                "prompt_tokens": 4,
                "cached_tokens": 0,
                "finish_reason": "stop",
            },
            {
                "text": "BLAU",
                "token_ids": [0, 1, 2, 3],
                "prompt_tokens": 4,
                "cached_tokens": 0,
                "finish_reason": "stop",
            },
        ],
        "cache_type": "radix_cache",
        "cache_type_reason": "because",
    }


def test_one_answer_is_printed_by_itself(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    generate_with(engine, prompt=("hello",))

    assert capsys.readouterr() == ("HELLO\n", "")


def test_several_answers_are_told_apart_by_their_prompts(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    generate_with(engine, prompt=("a", "b"))

    assert capsys.readouterr().out == (
        "> a\nA\n[1 prompt tokens, 0 cached; 1 answered, stop]\n\n"
        "> b\nB\n[1 prompt tokens, 0 cached; 1 answered, stop]\n\n"
        "cache type radix_cache: because\n"
    )


def test_hits_are_told_by_tier_where_there_are_tiers(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    # given: the fake has as many cached tokens as it was asked before, two of them from the host
    engine.has_tiers = True
    for _ in range(3):
        generate_with(engine, prompt=("a",))
    capsys.readouterr()

    # when
    generate_with(engine, prompt=("abcd", "efgh"))
    text = capsys.readouterr().out
    generate_with(engine, prompt=("abcd",), json=True)
    (entry,) = json.loads(capsys.readouterr().out)["outputs"]

    # then
    assert "[4 prompt tokens, 3 cached (1 device, 2 host, 0 storage); 4 answered, stop]" in text
    assert entry["cached_tokens"] == 4
    assert entry["cached_tokens_details"] == {"device": 2, "host": 2, "storage": 0}


def test_an_answer_cut_short_is_printed_and_told_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    code = generate_with(FakeEngine([None, "the pool is full", "too"]), prompt=("a", "b", "c"), json=True)

    shown = capsys.readouterr()
    assert code == 1
    assert [output.get("error") for output in json.loads(shown.out)["outputs"]] == [None, "the pool is full", "too"]
    assert shown.err == "tpukv: error: prompt 2 ended with capacity: the pool is full (and 1 more)\n"


# -- demo ------------------------------------------------------------------------------------------------------------


def test_demo_asks_the_first_question_alone_and_shows_cache_and_ledger(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.run(demo.DemoArgs(), engine.opening) == 0

    shown = capsys.readouterr().out
    rehearsal, served = engine.asked[:2], engine.asked[2:]
    assert [len(prompts) for prompts, _ in served] == [1, len(QUESTIONS) - 1]
    assert served[0][0][0].text == "What is the capital of France?"
    assert {prompt.system for prompts, _ in served for prompt in prompts} == {SYSTEM_PROMPT}
    assert [len(prompts) for prompts, _ in rehearsal] == [len(prompts) for prompts, _ in served]
    assert not any(str(prompt.system).startswith(SYSTEM_PROMPT[:20]) for prompts, _ in rehearsal for prompt in prompts)
    assert "WHAT IS THE CAPITAL OF FRANCE?" in shown
    assert "30 prompt tokens, 2 cached, first token after 2 ms" in shown
    assert "Cache type radix_cache: because" in shown
    assert "Ledger: every page has exactly one owner (3 free, 4 cached)" in shown


def test_engine_is_closed_when_it_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(refuses=True)

    with pytest.raises(RequestError):
        generate.run(GenerateArgs(prompt=("x",)), engine.opening)
    assert not engine.is_open
    with pytest.raises(RequestError):
        demo.run(demo.DemoArgs(), engine.opening)

    assert not engine.is_open
    assert capsys.readouterr().out == ""
