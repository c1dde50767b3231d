"""What a workload is: conversations, whose turns are requests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a chat. `content` None stands for what the server answered in the turn before."""

    role: str
    content: str | None


def _no_tokens() -> np.ndarray:
    return np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """One request: a prompt of token ids, or the messages of a chat.

    max_tokens: most tokens of the reply; just as many when `ignore_eos`, which tells the server to pass end tokens by.
    token_ids: (prompt tokens,) int32, empty for a chat. messages: empty for a prompt of token ids.
    """

    max_tokens: int
    ignore_eos: bool = True
    token_ids: np.ndarray = field(default_factory=_no_tokens)
    messages: tuple[Message, ...] = ()

    @property
    def path(self) -> str:
        """The route that it is sent to."""
        return CHAT if self.messages else COMPLETIONS

    @property
    def holds_last_reply(self) -> bool:
        """Whether what the server answered to the turn before is part of the prompt."""
        return any(message.content is None for message in self.messages)

    def sent_messages(self, last_reply: str) -> list[dict[str, str]]:
        """The messages as they are sent, after the server answered `last_reply` to the turn before."""
        return [
            {"role": message.role, "content": last_reply if message.content is None else message.content}
            for message in self.messages
        ]

    def prompt_fields(self, last_reply: str) -> dict[str, Any]:
        """The part of the request's body that holds the prompt."""
        if self.messages:
            return {"messages": self.sent_messages(last_reply)}
        return {"prompt": self.token_ids.tolist()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Conversation:
    """Turns that go one after another: the next only when the reply before has ended.

    arrival_s: when the data says that the first turn arrived; None when it says nothing.
    """

    name: str
    turns: tuple[Turn, ...]
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """notes: what was cut or left out to fit the server, one sentence each, for the report."""

    name: str
    conversations: tuple[Conversation, ...]
    notes: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        return sum(len(conversation.turns) for conversation in self.conversations)

    def digest(self) -> str:
        """Equal for workloads that send the same: a hash of every prompt and reply length, in order."""
        seen = hashlib.sha256()
        for conversation in self.conversations:
            for turn in conversation.turns:
                seen.update(msgspec.json.encode((turn.max_tokens, turn.ignore_eos, turn.messages, turn.token_ids.size)))
                seen.update(turn.token_ids.astype("<i4").tobytes())
            seen.update(b"end of conversation")
        return seen.hexdigest()


def shuffled(conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
    """The conversations in an order that follows from `seed` alone."""
    return [conversations[place] for place in np.random.default_rng(seed).permutation(len(conversations))]
