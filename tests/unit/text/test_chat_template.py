from __future__ import annotations

import re

import pytest

from app.errors import ConfigError, RequestError
from app.text.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "Hello <b>"}]


def render(source: str, messages: list[dict[str, str]] = HELLO, *, add_generation_prompt: bool = True) -> str:
    template = ChatTemplate(source, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, add_generation_prompt=add_generation_prompt)


def test_messages_special_tokens_and_the_generation_prompt_reach_the_template() -> None:
    source = (
        "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )

    assert render(source) == "<s>[user] Hello <b></s>[assistant] "
    assert render(source, add_generation_prompt=False) == "<s>[user] Hello <b></s>"


def test_blocks_are_trimmed_as_templates_expect() -> None:
    source = "{% for message in messages %}\n    {% if true %}\nx\n    {% endif %}\n{% endfor %}\n"

    assert render(source) == "x\n"


def test_tojson_keeps_angle_brackets_and_non_ascii_text() -> None:
    assert render("{{ messages[0] | tojson }}", [{"content": "<é>"}]) == '{"content": "<é>"}'
    assert render("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'


def test_loop_controls_and_generation_blocks_are_understood() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}"
        "{% generation %}{{ i }}{% endgeneration %}{% endfor %}"
    )

    assert render(source) == "01"


def test_strftime_now_gives_the_date() -> None:
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", render("{{ strftime_now('%Y-%m-%d') }}"))


def test_tools_and_documents_are_defined_as_absent() -> None:
    assert render("{{ tools is none and documents is none }}") == "True"


def test_a_refusal_of_the_template_is_a_request_error_in_its_words() -> None:
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 1 / 0 }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",  # out of the sandbox
        "{{ messages.append(1) }}",  # the caller's list stays as it is
        "{% for i in range(1000000000) %}{% endfor %}",
        "{% include 'other' %}",
    ],
)
def test_whatever_goes_wrong_in_a_template_is_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template"):
        render(source)


def test_a_template_that_does_not_compile_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="cannot compile"):
        ChatTemplate("{% for %}", special_tokens={})
