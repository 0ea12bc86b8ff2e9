"""Chat templates: compiled once, rendered in a sandbox, for conversations that clients send."""

import contextlib
from collections.abc import Mapping, Sequence
from types import CodeType
from typing import Any, Final

import jinja2

from aioengine.frontend.template_sandbox import TemplateEnvironment

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
    """A compiled template. None stands for a model without one: rendering then says why.

    Raises TemplateError for a source that does not compile. May be shared between threads: every
    rendering has an environment of its own.

    Templates come from whoever starts the server or published the model, never from clients.
    """

    def __init__(
        self, source: str | None, absence: str = "this model has no chat template"
    ) -> None:
        self.source = source
        self._absence = absence
        self._code: CodeType | None = None
        if source is None:
            return
        try:
            self._code = TemplateEnvironment().compile_bounded(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except Exception as error:  # too deep, or beyond a limit: constants are computed here
            raise TemplateError(f"chat template: {error}") from error

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
                f"{self._absence}: give one with --chat-template, or send text to /v1/completions",
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
    environment = TemplateEnvironment()
    template = jinja2.Template.from_code(environment, code, environment.globals)
    try:
        return template.render(variables)
    except Exception as error:  # a template can do anything that Python can refuse
        raise TemplateError(f"chat template: {error}", "messages") from error


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
