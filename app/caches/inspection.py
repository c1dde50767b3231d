"""What a cache says about itself: which prefixes matter most, and why a prompt's cached part ended where it did."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.config.model_config import Component
from app.core.keys import Namespace, RadixKey

MissReason = Literal[
    "whole",
    "no_reuse",
    "short",
    "unseen",
    "differs",
    "evicted",
    "incomplete",
    "other_namespace",
    "ends",
    "late",
    "untold",
]

# Tokens of each of the three texts by which a difference is shown.
CONTEXT_TOKENS = 8

_FIELDS_IN_WORDS = {
    "adapter": "adapter",
    "salt": "cache salt",
    "extra_key": "extra key",
    "dp_rank": "data-parallel rank",
}

_LACKING_IN_WORDS = {Component.SWA: "sliding-window pages", Component.RECURRENT: "recurrent state"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """Why the cached part of a prompt ended after `num_matched` tokens. `sentence` says it for a person.

    whole: it did not end too soon: the last token is always computed, and only whole pages are shared.
    no_reuse: this cache type never reuses a prefix.
    short: the prompt is not longer than one page, so there is nothing that could be reused.
    unseen: nothing cached begins like this prompt.
    differs: a cached prompt has the same first `same_tokens` tokens and goes on differently, within the next page.
    evicted: the next page was cached, and was evicted `evicted_s_ago` seconds ago.
    incomplete: the next page is cached, but something else that the model needs to go on after it is not: `lacking`.
    other_namespace: the next page is cached under a namespace that differs in `other_fields`, and only there.
    ends: the cached prompt ended there.
    late: the next page is cached now, but was not when the prompt was matched.
    untold: this cache type does not say.

    same, prompt_goes_on, cached_goes_on: with `differs`, token ids: the last equal ones (at most 8), and what follows
        in the prompt and in the cached one (1 to 8; the first of each are the two that differ).
    """

    reason: MissReason
    prompt_tokens: int
    num_matched: int
    page_size: int
    same_tokens: int | None = None
    same: tuple[int, ...] = ()
    prompt_goes_on: tuple[int, ...] = ()
    cached_goes_on: tuple[int, ...] = ()
    evicted_s_ago: float | None = None
    other_fields: tuple[str, ...] = ()
    lacking: tuple[Component, ...] = ()

    @property
    def sentence(self) -> str:
        """Plain English, without any token and without anything of another namespace."""
        match self.reason:
            case "whole":
                return (
                    f"Everything that can be reused was: {self.num_matched:,} of {self.prompt_tokens:,} tokens. "
                    f"Only whole pages of {self.page_size} tokens are shared, and the last token is always computed."
                )
            case "no_reuse":
                return "This cache type never reuses a prefix: every prompt is computed whole."
            case "short":
                return (
                    f"The prompt is too short: {self.prompt_tokens} tokens. Reuse begins with {self.page_size + 1}: "
                    f"one whole page of {self.page_size}, and one token that is always computed."
                )
            case "unseen":
                return "Nothing that is cached begins like this prompt."
            case "differs":
                return (
                    f"The first {self.same_tokens:,} tokens are those of a cached prompt; the next one differs. Pages "
                    f"of {self.page_size} tokens are shared whole, so reuse ended after {self.num_matched:,} tokens."
                )
            case "evicted":
                ago = _duration(self.evicted_s_ago or 0.0)
                return f"{self._what_missed} were cached, but were evicted {ago} earlier."
            case "incomplete":
                what = " and the ".join(_LACKING_IN_WORDS[component] for component in self.lacking)
                return (
                    f"{self._what_missed} are cached, but without the {what} that the model needs to go on after them: "
                    "evicted, or not kept there."
                )
            case "other_namespace":
                fields = " and another ".join(_FIELDS_IN_WORDS[name] for name in self.other_fields)
                return f"{self._what_missed} are cached only under another {fields}, which keeps them apart on purpose."
            case "ends":
                return (
                    f"The cached prompt that this one continues ends after {self.num_matched:,} tokens; what follows "
                    "was not cached."
                )
            case "late":
                return f"{self._what_missed} were cached only after this prompt had been looked up."
            case "untold":
                return "This cache type does not say why a prompt misses."

    @property
    def _what_missed(self) -> str:
        return f"The tokens after the first {self.num_matched:,}" if self.num_matched else "The first tokens"


class CachedPrefix(NamedTuple):
    """A prefix in the cache: from the start of a prompt to the end of one node.

    num_tokens: of the whole prefix. node_tokens: of its last node, which is what the hits are counted for.
    hits: matches that covered the node. idle_s: seconds since it was used; 0 while it is locked.
    head, tail: token ids: the first of the prefix (at most 24), and the last of the others (at most 8).
    """

    num_tokens: int
    node_tokens: int
    hits: int
    locked: bool
    idle_s: float
    namespace: Namespace
    head: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def saved_tokens(self) -> int:
        """Tokens that did not have to be computed because this node was cached."""
        return self.hits * self.node_tokens


class TopPrefixes(NamedTuple):
    """The prefixes that saved most, best first, among the `num_visited` most recently used nodes of `num_nodes`."""

    prefixes: tuple[CachedPrefix, ...]
    num_visited: int
    num_nodes: int

    @property
    def complete(self) -> bool:
        """Whether every node was looked at."""
        return self.num_visited == self.num_nodes


def miss_by_length(key: RadixKey, num_matched: int, page_size: int) -> Miss | None:
    """The reason, if the lengths alone tell it: short or whole. O(1)."""
    longest = (key.num_tokens - 1) // page_size * page_size
    if longest > 0 and num_matched < longest:
        return None
    return Miss(
        reason="whole" if longest > 0 else "short",
        prompt_tokens=key.num_tokens,
        num_matched=num_matched,
        page_size=page_size,
    )


def _duration(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f} seconds"
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours"
