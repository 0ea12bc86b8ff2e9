import re
import time
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest

from aioengine.frontend import template_sandbox
from aioengine.frontend.template import ChatTemplate, TemplateError
from aioengine.limits import MAX_TEMPLATE_CPU_S

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
        ("{{ 'a' * 10 ** 12 }}", "more than 16777216 characters"),
        ("{{ 2 ** 1000 }}", "exponent"),
        ("{{ 'aaaaaaaaaa' * 10 ** 6 }}" * 2, "more than 16777216 characters"),
    ],
)
def test_broken_and_hostile_templates(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render(CHAT)


GROWING = "{% set ns = namespace(x=%s) %}{% for i in range(99) %}{% set ns.x = %s %}{% endfor %}"
LOOP = "{% for a in range(99999) %}%s{% endfor %}"


def growing(start: str, step: str) -> str:
    """A template that makes something larger again and again."""
    return GROWING.replace("%s", start, 1).replace("%s", step, 1) + "{{ ns.x }}"


@pytest.mark.parametrize(
    "source",
    [
        growing("'ab'", "ns.x ~ ns.x"),
        growing("'ab'", "ns.x + ns.x"),
        growing("'ab'", "ns.x * 9"),
        growing("'ab'", "ns.x.replace('a', ns.x)"),
        growing("'ab'", "ns.x | replace('a', ns.x)"),
        growing("'ab'", "ns.x.join([ns.x, ns.x])"),
        growing("'ab'", "[ns.x, ns.x] | join(ns.x)"),
        growing("'ab'", "'%s%s' % (ns.x, ns.x)"),
        growing("'ab'", "'%s%s' | format(ns.x, ns.x)"),
        growing("'ab'", "'{}{}'.format(ns.x, ns.x)"),
        growing("'ab'", "'{0}{0}{0}'.format_map({'0': ns.x})"),
        growing("'ab\\nb'", "ns.x | indent(ns.x)"),
        growing("'\"'", "ns.x | tojson"),
        growing("[1]", "[ns.x, ns.x]"),
        growing("[1]", "(ns.x, ns.x)"),
        growing("[1]", "{'a': ns.x, 'b': ns.x}"),
        growing("[1]", "dict(a=ns.x, b=ns.x)"),
        growing("[1]", "ns.x + ns.x"),
        growing("[1]", "[false, false] | map('default', ns.x, true) | list"),
        growing("[1]", "[ns.x, ns.x] | map('string') | list"),
        growing("2", "ns.x * ns.x"),
        growing("2", "ns.x ** 9"),
        growing("''", "['a' * 9999999] | map('upper') | list"),
        "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * 40 + "{{ x }}",
        "{% macro m(x) %}{{ x }}{{ x }}{{ caller() }}{% endmacro %}"
        + LOOP.replace("%s", "{% call m('a' * 9999) %}{% endcall %}"),
        "{{ '%1000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 1000000000) }}",
        "{{ 'a' | indent(1000000000, true) }}",
        "{{ [[1]] | tojson(indent=1000000000) }}",
        "{{ 1.5 | round(1000000000, 'floor') }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a\\t'.expandtabs(1000000000) }}",
        "{{ (1).to_bytes(1000000000, 'big') }}",
        "{{ 'a' | center(1000000000) }}",
        "{{ lipsum(n=1000000000) }}",
        LOOP.replace("%s", LOOP.replace("%s", "")),
        LOOP.replace("%s", "{% for b in range(99999) if b < 0 %}{% endfor %}"),
        LOOP.replace("%s", "{{ range(99999) | select('lt', 0) | list }}"),
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{% set ns = namespace(d=0) %}{% block a scoped %}{% set ns.d = ns.d + 1 %}"
        "{% if ns.d < 200 %}{{ self.a() }}{{ self.a() }}{% endif %}"
        "{% set ns.d = ns.d - 1 %}{% endblock %}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ [ns] * 99999999 }}",
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ '" + "a" * 9999 + "' * " + "9 * " * 99 + "9 }}",
    ],
)
def test_bombs_end_soon_and_small(source: str) -> None:
    """PYSEC-2026-2013, CVE-2026-115911: Jinja templates that exhaust the server."""
    began_s, rss_before_kib = time.thread_time(), getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError, match="chat template"):
        ChatTemplate(source).render(CHAT)
    assert time.thread_time() - began_s < 2 * MAX_TEMPLATE_CPU_S
    assert getrusage(RUSAGE_SELF).ru_maxrss - rss_before_kib < 200 * 2**10


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__[1].__subclasses__()",
        "messages.__init__",
        "messages[0].__class__",
        "raise_exception.__globals__",
        "strftime_now.__code__",
        "namespace.__init__.__globals__",
        "cycler.__init__.__globals__",
        "joiner.__init__.__globals__",
        "range.__self__",
        "self.__init__.__globals__",
        "self._TemplateReference__context",
        "loop.__init__",
        "(messages | attr('__class__')).mro()",
        "[''] | map(attribute='__class__') | list | first",
        "'{0.__class__}'.format(messages)",
        "('{0.__class__}' | attr('format'))(messages)",
        "'{0.__class__}'.format_map({'0': messages})",
        "messages.sort()",
        "messages[0].pop('role')",
        "messages[0].setdefault('a', 1)",
        "messages | map('__import__') | list",
    ],
)
def test_no_way_out_of_the_sandbox(expression: str) -> None:
    """CVE-2024-34359: code in the template of a GGUF file ran in the server; CVE-2024-56326,
    CVE-2025-27516: ways round Jinja's sandbox."""
    source = "{% for x in [1] %}<{{ " + expression + " }}>{% endfor %}"
    try:
        rendered = ChatTemplate(source).render(CHAT)
    except TemplateError:
        return
    assert rendered == "<>"


def test_a_rendering_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However few steps it needs."""
    monkeypatch.setattr(template_sandbox, "MAX_TEMPLATE_CPU_S", 0.05)
    slow = LOOP.replace("%s", "{{ 'a' * 999 == 'b' * 999 }}")
    with pytest.raises(TemplateError, match=r"takes more than 0\.05 s"):
        ChatTemplate(slow).render(CHAT)


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
