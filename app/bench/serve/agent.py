"""The workload `agent`: recorded runs of a coding agent, replayed turn by turn.

Every message of the assistant is one request, whose prompt is all the messages before it. The recorded message, not the
server's reply, goes into the next prompt, so every server gets the same prompts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from app.bench.serve.conversation import Conversation, Message, Turn, Workload, shuffled
from app.bench.serve.server_api import CountedMessages
from app.errors import ConfigError


class _Message(msgspec.Struct):
    role: str
    content: str


class _Trajectory(msgspec.Struct):
    messages: list[_Message]


def agent_conversations(folder: Path, *, max_tokens: int, seed: int, count: int | None) -> list[Conversation]:
    """The first `count` (None: all) of the folder's runs, in an order that follows from `seed`.

    Raises ConfigError for a folder without runs and for a file that is none.
    """
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise ConfigError(field="data", value=str(folder), allowed="a folder of agent runs, one .json file each")
    return shuffled([_conversation(path, max_tokens) for path in paths], seed)[:count]


async def fit_to_context(conversations: list[Conversation], counted: CountedMessages, context_length: int) -> Workload:
    """The conversations without the turns that are too long for the server; the notes say how many those are.

    Asks the server for the tokens of every prompt. Raises ConfigError when nothing is left.
    """
    fitting = []
    for conversation in conversations:
        turns = [
            turn
            for turn in conversation.turns
            if len(await counted.token_ids(turn.sent_messages(""))) + turn.max_tokens <= context_length
        ]
        if turns:
            fitting.append(Conversation(name=conversation.name, turns=tuple(turns)))
    workload = Workload(name="agent", conversations=tuple(fitting))
    asked = sum(len(conversation.turns) for conversation in conversations)
    if not fitting:
        raise ConfigError(
            field="max_tokens",
            value=conversations[0].turns[0].max_tokens,
            allowed=f"replies that leave room for a prompt in the server's context of {context_length} tokens; "
            f"not one of {asked} turns fits",
        )
    if workload.num_requests == asked:
        return workload
    note = (
        f"{asked - workload.num_requests} of {asked} turns are left out: longer than the server's context of "
        f"{context_length} tokens"
    )
    return Workload(name="agent", conversations=workload.conversations, notes=(note,))


def _conversation(path: Path, max_tokens: int) -> Conversation:
    messages = [Message(role=message.role, content=message.content) for message in _read(path).messages]
    turns = [
        Turn(max_tokens=max_tokens, messages=tuple(messages[:place]))
        for place, message in enumerate(messages)
        if message.role == "assistant" and place
    ]
    if not turns:
        raise _not_a_run(path, "it has no message of an assistant after another message")
    return Conversation(name=path.stem, turns=tuple(turns))


def _read(path: Path) -> _Trajectory:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Trajectory)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_a_run(path, error) from error


def _not_a_run(path: Path, reason: Any) -> ConfigError:
    return ConfigError(field="data", value=str(path), allowed=f"a file of one agent run with its messages ({reason})")
