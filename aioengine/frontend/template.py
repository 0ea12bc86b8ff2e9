"""Chat templates: Jinja in a sandbox, with the helpers that Hugging Face templates rely on."""

import contextlib
import datetime
import json
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from aioengine.limits import (
    MAX_TEMPLATE_EXPONENT,
    MAX_TEMPLATE_ITERATIONS,
    MAX_TEMPLATE_OUTPUT_CHARS,
)

END_MARK: Final = "\ue000end of the final message\ue000"
OWN_NAMES: Final = frozenset({"messages", "add_generation_prompt", "bos_token", "eos_token"})


class TemplateError(ValueError):
    """The template is broken, refuses the conversation, or goes beyond a limit.

    Of a rendering, `field` is the part of the request that is at fault.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    def __str__(self) -> str:
        message = super().__str__()
        return message if self.field is None else f"{self.field}: {message}"


class ChatTemplate:
    """A compiled template. None stands for a model that has none: rendering then says so.

    Raises TemplateError for a source that does not compile. May be shared between threads: every
    rendering has an environment of its own.

    The limits stop a template that runs away, not one written to hurt: `~` can still double a
    string. So templates come from whoever starts the server, never from clients.
    """

    def __init__(self, source: str | None) -> None:
        self.source = source
        self._code = None
        if source is None:
            return
        environment = _Environment()
        try:
            tree = environment.parse(source)
            bodies = [loop.body for loop in tree.find_all(nodes.For)]
            bodies += [macro.body for macro in tree.find_all(nodes.Macro)]
            for body in bodies:
                body.insert(0, _count_iteration())
            self._code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        bos_token: str | None = None,
        eos_token: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, with its special tokens (encode it without adding any).

        Lists of text parts become one string. `continue_final_message` leaves the last message
        open. `extra` holds further variables for the template. Raises TemplateError.
        """
        if self._code is None:
            raise TemplateError(
                "this model has no chat template: give one with --chat-template, or send text to "
                "/v1/completions",
                "messages",
            )
        if continue_final_message and add_generation_prompt:
            raise TemplateError("excludes add_generation_prompt", "continue_final_message")
        extra = extra or {}
        if taken := sorted(OWN_NAMES & extra.keys()):
            raise TemplateError(f"must not set {', '.join(taken)}", "chat_template_kwargs")
        plain = [{**message, "content": _joined(message.get("content"))} for message in messages]
        if continue_final_message:
            _mark_end(plain)
        special = {"bos_token": bos_token, "eos_token": eos_token}
        own = {
            **{name: token for name, token in special.items() if token is not None},
            "messages": plain,
            "add_generation_prompt": add_generation_prompt,
        }
        rendered = _render(self._code, own, extra)
        return _cut_at_mark(rendered) if continue_final_message else rendered


class _Environment(ImmutableSandboxedEnvironment):
    """What one rendering may use and how much: the counter makes it good for one only."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlocks],
        )
        self.num_iterations = 0
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def count_iteration(self) -> None:
        self.num_iterations += 1
        if self.num_iterations > MAX_TEMPLATE_ITERATIONS:
            raise SecurityError(f"more than {MAX_TEMPLATE_ITERATIONS} loop passes")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and abs(right) > MAX_TEMPLATE_EXPONENT:
            raise SecurityError(f"exponent above {MAX_TEMPLATE_EXPONENT}")
        for repeated, times in ((left, right), (right, left)):
            repeats = isinstance(repeated, str | list | tuple) and isinstance(times, int)
            if repeats and len(repeated) * times > MAX_TEMPLATE_OUTPUT_CHARS:
                raise SecurityError(f"more than {MAX_TEMPLATE_OUTPUT_CHARS} elements")
        return super().call_binop(context, operator, left, right)


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks a trainer's loss mask; here it is its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (the base class declares an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _count_iteration() -> nodes.Stmt:
    """A statement that a template cannot shadow: it reads the environment, not a variable."""
    function = nodes.EnvironmentAttribute("count_iteration")
    return nodes.ExprStmt(nodes.Call(function, [], [], None, None))


def _render(code: CodeType, own: Mapping[str, Any], extra: Mapping[str, Any]) -> str:
    """`extra` is at fault when the template fails with it and not without."""
    try:
        return _run(code, {"tools": None, "documents": None, **extra, **own})
    except TemplateError as error:
        if extra:
            with contextlib.suppress(TemplateError):
                _render(code, own, {})
                error.field = "chat_template_kwargs"
        raise


def _run(code: CodeType, variables: dict[str, Any]) -> str:
    environment = _Environment()
    template = jinja2.Template.from_code(environment, code, environment.globals)
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(variables):
            size += len(piece)
            if size > MAX_TEMPLATE_OUTPUT_CHARS:
                raise SecurityError(f"more than {MAX_TEMPLATE_OUTPUT_CHARS} characters")
            pieces.append(piece)
    except Exception as error:  # a template can do anything that Python can refuse
        raise TemplateError(f"chat template: {error}", "messages") from error
    return "".join(pieces)


def _joined(content: Any) -> Any:
    """Text parts as one string; anything else as it is."""
    if not isinstance(content, list):
        return content
    for part in content:
        if part.get("type") != "text":
            raise TemplateError(
                f"content part of type {part.get('type')!r}: only text is supported", "messages"
            )
    return "".join(part["text"] for part in content)


def _mark_end(messages: list[dict[str, Any]]) -> None:
    if not messages or not isinstance(messages[-1]["content"], str):
        raise TemplateError("needs a last message with text", "continue_final_message")
    messages[-1]["content"] += END_MARK + " "


def _cut_at_mark(rendered: str) -> str:
    end = rendered.rfind(END_MARK)
    if end < 0:
        raise TemplateError("this template leaves out the last message", "continue_final_message")
    if rendered.startswith(" ", end + len(END_MARK)):
        return rendered[:end]
    return rendered[:end].rstrip()  # the template trims messages


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002  (the name that templates use)
    return datetime.datetime.now().strftime(format)
