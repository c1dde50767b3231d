"""Text to token ids and back, from the files of a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from app.errors import ConfigError, RequestError
from app.text.chat_template import ChatTemplate
from app.text.json_files import read_optional_json_object
from app.text.token_bytes import TokenBytes


class HfTokenizer:
    """`core.ports.Tokenizer` over the `tokenizers` library. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """Takes `backend` over: limits on length and padding that its file may ask for are switched off in it."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._eos_token_ids = eos_token_ids
        self._chat_template = chat_template
        self._token_bytes = TokenBytes(backend)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's object, for incremental detokenisation. Read only."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Tokens with a text, added ones included. A model's own table may be longer, for the sake of its shape."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end an answer, without repetition."""
        return self._eos_token_ids

    def encode(self, text: str) -> np.ndarray:
        """(num_tokens,) int32; adds no token of its own; special tokens written out in `text` are recognised.

        Raises RequestError for text that is no Unicode (half a surrogate pair). O(len(text)).
        """
        _require_unicode(text)
        # A batch of one: unlike `encode`, that lets other threads run meanwhile, and computes no offsets.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, token_ids: np.ndarray, *, skip_special_tokens: bool = True) -> str:
        """The text of (num_tokens,) ids. Bytes that form no character become U+FFFD; ids without a token, nothing."""
        return self._backend.decode(np.asarray(token_ids).tolist(), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, special tokens their text; b"" for an id without a token."""
        return self._token_bytes(token_id)

    def apply_chat_template(self, messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
        """The prompt text of a conversation.

        Raises RequestError when the model has no template or the template refuses the messages.
        """
        if self._chat_template is None:
            raise RequestError(
                field="messages",
                value=[message.get("role") for message in messages],
                allowed="this model has no chat template; send the prompt as plain text (--raw, or /v1/completions)",
            )
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)


def load_tokenizer(folder: Path) -> HfTokenizer:
    """Read tokenizer.json, tokenizer_config.json, generation_config.json, config.json and chat_template.jinja.

    Only tokenizer.json must be there. Raises ConfigError naming the file that is missing or damaged.
    """
    backend = _read_backend(folder / "tokenizer.json")
    config = read_optional_json_object(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config)
    source = _template_source(folder, config)
    return HfTokenizer(
        backend,
        eos_token_ids=_eos_token_ids(folder, backend, special_tokens.get("eos_token")),
        chat_template=None if source is None else ChatTemplate(source, special_tokens=special_tokens),
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ConfigError(field="model_path", value=str(path.parent), allowed="a folder with a tokenizer.json")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for everything that is wrong with the file
        raise ConfigError(
            field="model_path", value=str(path), allowed=f"is no tokenizer that the library can read: {error}"
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... as texts; the file has them plain or as an object with a `content`."""
    named = {name: value for name, value in config.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        try:
            return own_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(field="model_path", value=str(own_file), allowed=f"cannot be read: {error}") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """What the generation settings say (else the model's own), and the tokenizer's end token."""
    ids = _end_ids(folder / "generation_config.json") or _end_ids(folder / "config.json")
    own = None if eos_token is None else backend.token_to_id(eos_token)
    return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))


def _end_ids(path: Path) -> list[int]:
    value = read_optional_json_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ConfigError(field=f"{path} eos_token_id", value=value, allowed="a token id or a list of them")
    return ids


def _require_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            field="prompt",
            value=ascii(text[error.start : error.end]),
            allowed=f"Unicode text, but character {error.start} is half of a surrogate pair",
        ) from None
