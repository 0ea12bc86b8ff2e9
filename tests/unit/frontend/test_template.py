import re
from typing import Any

import pytest

from aioengine.frontend.template import ChatTemplate, TemplateError

CHAT = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Well "}]
LINES = (
    "{{ bos_token }}{% for m in messages %}\n"
    "    {% if m.role == 'user' %}\n"
    "[{{ m.content }}]{% else %}\n"
    "{{ m.content }}{{ eos_token }}{% endif %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}>{% endif %}"
)


def test_rendering() -> None:
    template = ChatTemplate(LINES)
    rendered = template.render(CHAT, bos_token="<s>", eos_token="</s>")
    assert rendered == "<s>[Hi <b>]Well </s>>"
    assert template.render(CHAT, add_generation_prompt=False) == "[Hi <b>]Well "


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "Hi <b>"}'),
        ("{{ ['é'] | tojson(indent=1) }}", '[\n "é"\n]'),
        ("{% for m in messages %}{{ loop.index }}{% break %}{% endfor %}", "1"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{{ tools is none }} {{ documents is none }} {{ mood }}", "True True good"),
        ("{{ bos_token is defined }}", "False"),
        ("{{ 'ab' * 2 }}{{ 3 * 2 }}{{ 2 ** 3 }}", "abab68"),
    ],
)
def test_what_templates_rely_on(source: str, expected: str) -> None:
    assert ChatTemplate(source).render(CHAT, extra={"mood": "good"}) == expected


def test_strftime_now() -> None:
    rendered = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(CHAT)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", rendered)


def test_text_parts_become_one_string() -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    message: dict[str, Any] = {"role": "user", "content": parts}
    assert ChatTemplate("{{ messages[0].content }}").render([message]) == "Hi there"
    parts.append({"type": "image_url"})
    with pytest.raises(TemplateError, match="'image_url': only text"):
        ChatTemplate("").render([message])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{{ m.content }}", "[Hi <b>]\n\n[Well "),
        ("{{ m.content | trim }}", "[Hi <b>]\n\n[Well"),
    ],
)
def test_continue_final_message(content: str, expected: str) -> None:
    template = ChatTemplate("{% for m in messages %}[" + content + "]\n\n{% endfor %}")
    rendered = template.render(CHAT, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected
    assert CHAT[-1]["content"] == "Well "


def test_continuing_what_cannot_be_continued() -> None:
    last: list[dict[str, Any]]
    for last, source, message in (
        ([], "", "needs a last message"),
        ([{"role": "assistant", "content": None}], "", "needs a last message"),
        (CHAT, "{{ messages[0].content }}", "leaves out the last message"),
    ):
        with pytest.raises(TemplateError, match=message):
            ChatTemplate(source).render(
                last, add_generation_prompt=False, continue_final_message=True
            )
    with pytest.raises(TemplateError, match="excludes add_generation_prompt"):
        ChatTemplate("").render(CHAT, add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "chat template: roles must alternate"),
        ("{{ messages[7].content + 'a' }}", "no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% set m = messages[0] %}{{ m.update(role='x') }}", "unsafe"),
        ("{% for i in range(10 ** 6) %}{% endfor %}", "Range too big"),
        ("{% for i in range(9999) %}" * 2 + "{% endfor %}" * 2, "loop passes"),
        ("{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}", "recursion"),
        ("{{ 'a' * 10 ** 12 }}", "elements"),
        ("{{ 2 ** 1000 }}", "exponent"),
        ("{{ 'aaaaaaaaaa' * 10 ** 6 }}" * 2, "more than 16777216 characters"),
    ],
)
def test_broken_and_hostile_templates(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render(CHAT)


def test_no_template_and_no_syntax() -> None:
    with pytest.raises(TemplateError, match="no chat template: give one with --chat-template"):
        ChatTemplate(None).render(CHAT)
    with pytest.raises(TemplateError, match="chat template, line 2: "):
        ChatTemplate("\n{% for %}")


def test_errors_name_the_part_of_the_request_that_is_at_fault() -> None:
    template = ChatTemplate("{% if strict or not messages %}{{ raise_exception('no') }}{% endif %}")
    for messages, extra, field in (
        (CHAT, {"strict": True}, "chat_template_kwargs"),
        ([], {"strict": True}, "messages"),
        ([], {}, "messages"),
    ):
        with pytest.raises(TemplateError, match=f"{field}: chat template: no") as raised:
            template.render(messages, extra=extra)
        assert raised.value.field == field


def test_extra_variables_leave_ours_alone() -> None:
    with pytest.raises(TemplateError, match="chat_template_kwargs: must not set messages"):
        ChatTemplate("").render(CHAT, extra={"messages": []})
