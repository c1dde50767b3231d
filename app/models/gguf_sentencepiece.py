"""A SentencePiece vocabulary of the kind that merges, as GGUF files carry it -> a `tokenizers` object.

SentencePiece joins, again and again, the two neighbours whose joint token has the highest score (arXiv:1808.06226). BPE
does the same with a list of pairs in the order of those scores, which is made here.
"""

from __future__ import annotations

from gguf.constants import TokenType
from tokenizers import Tokenizer, decoders, models, normalizers

from app.errors import ConfigError
from app.models.gguf_metadata import GgufMetadata

_SPACE = "▁"  # in tokens, for a space


def sentencepiece_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """Without its special tokens. Raises ConfigError for lists that do not go together. O(characters of all tokens)."""
    tokens, types = metadata.texts("tokenizer.ggml.tokens"), metadata.wholes("tokenizer.ggml.token_type")
    scores = metadata.numbers("tokenizer.ggml.scores")
    for name, values in (("scores", scores), ("token_type", types)):
        if len(values) != len(tokens):
            allowed = f"one for each of {len(tokens)} tokens"
            raise ConfigError(field=f"tokenizer.ggml.{name}", value=f"{len(values)} values", allowed=allowed)
    ordinary = {
        token: score
        for token, score, token_type in zip(tokens, scores, types, strict=True)
        if token_type == TokenType.NORMAL
    }
    unknown = metadata.whole("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: token_id for token_id, token in enumerate(tokens)},
            merges=_merges(ordinary),
            unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
            fuse_unk=True,
            byte_fallback=TokenType.BYTE in types,
        )
    )
    begins_with_space = metadata.switch("tokenizer.ggml.add_space_prefix", True)
    marked = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), marked]) if begins_with_space else marked
    unmarked = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*unmarked, decoders.Strip(" ", 1, 0)] if begins_with_space else unmarked)
    return tokenizer


def _merges(scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every pair of tokens that makes a token, the one with the highest score first."""
    return [
        (token[:cut], token[cut:])
        for token in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
