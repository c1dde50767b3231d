"""The tokenizer inside a GGUF file -> a `tokenizers` object and tokenizer_config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gguf.constants import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from app.errors import ConfigError
from app.models.gguf_metadata import GgufMetadata
from app.models.gguf_sentencepiece import sentencepiece_tokenizer

# How Llama 3 and Qwen 2 cut text before merging, as published in their tokenizer.json: they differ in digits only.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = _WORDS % r"\p{N}{1,3}"
_QWEN2_WORDS = _WORDS % r"\p{N}"

_SPECIAL_TOKENS = {  # name in tokenizer_config.json -> name in the GGUF metadata
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
_END_TOKENS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")


def build_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    """From tokens, token types, and merges or scores. Raises ConfigError for a kind of tokenizer that is not known."""
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        allowed = "supported in a GGUF file: 'gpt2' (byte-level BPE), 'llama' (SentencePiece's BPE)"
        raise ConfigError(field="tokenizer.ggml.model", value=kind, allowed=allowed)
    tokenizer = _KINDS[kind](metadata)
    _add_special_tokens(tokenizer, metadata)
    return tokenizer


def tokenizer_config(metadata: GgufMetadata) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by name, and the chat template where there is one."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    config = {name: tokens[token_id] for name, key in _SPECIAL_TOKENS.items() for token_id in _known_id(metadata, key)}
    template = metadata.text("tokenizer.chat_template")
    return config if template is None else {**config, "chat_template": template}


def end_token_ids(metadata: GgufMetadata) -> list[int]:
    """Ids that end an answer: end of text and, where the file has one, end of turn."""
    return list(dict.fromkeys(token_id for key in _END_TOKENS for token_id in _known_id(metadata, key)))


def _known_id(metadata: GgufMetadata, key: str) -> list[int]:
    """The token id under `key` in a list, or an empty one when there is none or it names no token."""
    token_id = metadata.whole(key)
    return [] if token_id is None or token_id >= len(metadata.texts("tokenizer.ggml.tokens")) else [token_id]


def _byte_level_tokenizer(metadata: GgufMetadata) -> Tokenizer:
    cutting = metadata.text("tokenizer.ggml.pre")
    if cutting not in _PRE_TOKENIZERS:
        raise ConfigError(field="tokenizer.ggml.pre", value=cutting, allowed=f"known are {sorted(_PRE_TOKENIZERS)}")
    tokenizer = Tokenizer(_bpe(metadata, ignore_merges=cutting == "llama-bpe"))
    _PRE_TOKENIZERS[cutting](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _bpe(metadata: GgufMetadata, *, ignore_merges: bool) -> models.BPE:
    tokens, merges = metadata.texts("tokenizer.ggml.tokens"), metadata.texts("tokenizer.ggml.merges")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    try:
        return models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the library raises bare Exception for a merge of unknown tokens
        raise ConfigError(field="tokenizer.ggml.merges", value=len(merges), allowed=f"not readable: {error}") from error


def _add_special_tokens(tokenizer: Tokenizer, metadata: GgufMetadata) -> None:
    """Tokens that are found in text as a whole. Control tokens are special: decoding may leave them out."""
    tokens, types = metadata.texts("tokenizer.ggml.tokens"), metadata.wholes("tokenizer.ggml.token_type")
    marked = list(zip(tokens, types, strict=False))
    control = [token for token, token_type in marked if token_type == TokenType.CONTROL]
    own = [token for token, token_type in marked if token_type == TokenType.USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in own])


def _gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _smollm(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _llama3(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = _cut_by(_LLAMA3_WORDS)


def _qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _cut_by(_QWEN2_WORDS)


def _cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: dict[Any, Callable[[Tokenizer], None]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": _llama3,
    "qwen2": _qwen2,
}
_KINDS: dict[Any, Callable[[GgufMetadata], Tokenizer]] = {
    "gpt2": _byte_level_tokenizer,
    "llama": sentencepiece_tokenizer,
}
