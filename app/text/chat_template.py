"""From messages to prompt text by the model's own jinja2 template, in a sandbox.

The environment is set up the way Hugging Face does it, since templates are written against that: trimmed blocks,
`raise_exception`, `strftime_now`, a `tojson` that leaves non-ASCII text alone, loop controls, and `{% generation %}`
blocks (which only mark what is trained on, so here they are transparent).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from app.errors import ConfigError, RequestError


class ChatTemplate:
    """One compiled template. Compiling costs some milliseconds and happens once, in the constructor."""

    def __init__(self, source: str, *, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: what the template sees as `bos_token`, `eos_token` and so on.

        Raises ConfigError when jinja2 cannot compile `source`.
        """
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                field="chat_template", value=_head(source), allowed=f"jinja2 cannot compile it: {error}"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The prompt text. Raises RequestError with the template's own words when it refuses the messages."""
        try:
            return self._template.render(
                **self._special_tokens,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program of somebody else's: it can raise anything
            raise RequestError(
                field="messages",
                value=[message.get("role") for message in messages],
                allowed=f"the model's chat template refuses them: {error}",
            ) from error


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` renders as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, > and &, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _head(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
