"""The workload `mtbench`: questions with a follow-up, all under one system prompt.

The second turn holds what the server itself answered to the first, as in a chat with a person. So replies end where
the model ends them: tokens after an end token would be in the server's cache, but in no later prompt.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from app.bench.serve.conversation import Conversation, Message, Turn, Workload, shuffled
from app.errors import ConfigError

SYSTEM_PROMPT = """\
You are the assistant of a small public library. People of all ages write to you from the reading room and from home, \
about homework, travel plans, recipes, letters, numbers, code and books. Be friendly and calm, and take every question \
seriously, however short it is.

Keep to these habits. Answer in the language of the question. Begin with the answer itself and explain afterwards. \
Use plain words and short paragraphs; make a list only where order or number matters. When a task has steps, work \
through them one at a time and check the last result before you write it down. When a question leaves something open, \
say which reading you chose and go on. If you do not know, say so, and name a kind of book or office that would. Never \
invent a title, an author or a figure. When somebody asks you to change an earlier answer, change what was asked and \
leave the rest as it was. When you write code, keep it small, name things after what they are, and say how to run it. \
Leave out greetings, praise and apologies, and stop when the question is answered."""


class _Question(msgspec.Struct):
    question_id: int
    turns: list[str]


def mtbench_workload(path: Path, *, max_tokens: int, seed: int, count: int | None) -> Workload:
    """The first `count` (None: all) of the file's questions, in an order that follows from `seed`.

    Raises ConfigError for a file that has no such questions.
    """
    conversations = shuffled([_conversation(question, max_tokens) for question in _read(path)], seed)
    return Workload(name="mtbench", conversations=tuple(conversations[:count]))


def _conversation(question: _Question, max_tokens: int) -> Conversation:
    messages = [Message(role="system", content=SYSTEM_PROMPT)]
    turns = []
    for text in question.turns:
        messages.append(Message(role="user", content=text))
        turns.append(Turn(max_tokens=max_tokens, ignore_eos=False, messages=tuple(messages)))
        messages.append(Message(role="assistant", content=None))
    return Conversation(name=f"question-{question.question_id}", turns=tuple(turns))


def _read(path: Path) -> list[_Question]:
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
        questions = msgspec.json.decode(b"[%s]" % b",".join(lines), type=list[_Question])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            field="data", value=str(path), allowed=f"a file of MT-bench questions, one JSON object a line ({error})"
        ) from error
    for question in questions:
        if len(question.turns) != 2:
            raise ConfigError(
                field="data",
                value=str(path),
                allowed=f"questions of two turns, but question {question.question_id} has {len(question.turns)}",
            )
    if not questions:
        raise ConfigError(field="data", value=str(path), allowed="a file of at least one question")
    return questions
