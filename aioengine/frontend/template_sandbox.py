"""What a chat template may use, and how much of it.

A thread cannot be killed and a rank starts no process, so a rendering has to end by itself,
whatever its template does. Every way to go round again (loop passes, macros, calls) is a step that
looks at the budget, and every operation whose result may be longer than what it is made of is
weighed before it is done; the others, and methods that no chat template needs, are not there. So
what runs between two steps is short, and a runaway ends as an error like any other.
"""

import datetime
import json
import re
import time
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import Environment, nodes, pass_environment
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import FILTERS as JINJA_FILTERS
from jinja2.filters import do_indent, do_round, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from aioengine.limits import (
    MAX_TEMPLATE_ARGUMENTS,
    MAX_TEMPLATE_CPU_S,
    MAX_TEMPLATE_EXPONENT,
    MAX_TEMPLATE_INT_BITS,
    MAX_TEMPLATE_MADE_CHARS,
    MAX_TEMPLATE_OUTPUT_CHARS,
    MAX_TEMPLATE_STEPS,
)

ELEMENT_CHARS: Final = 32
"""What an element of a list or object weighs beside its text."""
HARMLESS_FILTERS: Final = (
    "abs attr capitalize count d default dictsort e escape first float groupby int items "
    "last length list lower map max min reject rejectattr reverse safe select selectattr sort "
    "string sum title trim unique upper"
)
"""Whose result is hardly longer than what it is made of."""
TEXT_METHODS: Final = (
    "capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal "
    "isdigit islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith strip "
    "swapcase title upper"
)
METHODS: Final[dict[type, frozenset[str]]] = {
    str: frozenset(TEXT_METHODS.split()),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset(),
}
"""Of the values that a template can have; other attributes of theirs are unsafe."""
PADDING: Final = re.compile(r"\d{4}|\*|\{[^{}]*\{")
"""In a format: a width of thousands, or one that is an argument."""


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """For one rendering, or one compilation: it holds the budget."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[LoopControlExtension, _GenerationBlocks],
            finalize=self._written,
        )
        self._num_steps = 0
        self._num_made_chars = 0
        self._ends_at_s = time.thread_time() + MAX_TEMPLATE_CPU_S
        self._weights: dict[int, tuple[Any, int]] = {}
        """By identity, of containers, which cannot change; they are kept so that ids are theirs."""
        self.filters = FILTERS
        self.globals |= {
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }
        del self.globals["lipsum"]

    def compile_bounded(self, source: str) -> Any:
        """Code that renders within the budget of whichever environment runs it."""
        return self.compile(_Bounds().visit(self.parse(source)))

    # --- what the code of a template calls

    @property
    def next_step(self) -> bool:
        """Read where a template goes round again. True, so that it can stand in a condition."""
        self._step()
        return True

    def _step(self) -> None:
        self._num_steps += 1
        if self._num_steps > MAX_TEMPLATE_STEPS:
            raise SecurityError(f"more than {MAX_TEMPLATE_STEPS} loop passes and calls")
        if time.thread_time() > self._ends_at_s:
            raise SecurityError(f"takes more than {MAX_TEMPLATE_CPU_S:g} s")

    def checked(self, value: Any) -> Any:
        """A value that was just made, if there may be such a one."""
        if isinstance(value, str | list | tuple | dict):
            self._count(self._weigh(value))
        elif isinstance(value, int) and value.bit_length() > MAX_TEMPLATE_INT_BITS:
            raise SecurityError(f"a number of more than {MAX_TEMPLATE_INT_BITS} bits")
        return value

    def _count(self, num_chars: int) -> None:
        """Of a value that is made."""
        _check_size(num_chars)
        self._num_made_chars += num_chars
        if self._num_made_chars > MAX_TEMPLATE_MADE_CHARS:
            raise SecurityError(f"makes more than {MAX_TEMPLATE_MADE_CHARS} characters")

    def concat(self, pieces: Iterable[Any]) -> str:
        """`~`, and what blocks, macros and the whole template have written."""
        return str(self.checked("".join(_bounded(pieces))))

    def concat_all(self, *pieces: Any) -> str:
        return self.concat(pieces)

    def _written(self, value: Any) -> Any:
        """What `{{ }}` writes."""
        return self.checked(str(value)) if isinstance(value, list | tuple | dict) else value

    def percent(self, text: str, values: Any) -> str:
        """`text % values`."""
        _check_format(text, self._weigh(values))
        return str(text % values)

    # --- what the sandbox calls

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, methods in METHODS.items():
            if isinstance(obj, kind):
                return attr in methods
        return super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self._count(len(left) + len(right))
            return left + right
        if operator == "**":
            if abs(right) > MAX_TEMPLATE_EXPONENT:
                raise SecurityError(f"exponent above {MAX_TEMPLATE_EXPONENT}")
        elif operator == "*":
            for repeated, times in ((left, right), (right, left)):
                if isinstance(repeated, str | list | tuple) and isinstance(times, int):
                    _check_size(self._weigh(repeated) * times)
        elif operator == "%" and isinstance(left, str):
            return self.checked(self.percent(left, right))
        return self.checked(super().call_binop(context, operator, left, right))

    def call(  # the sandbox's own names, so that a template's keywords cannot be the same
        __self,
        __context: Context,
        __obj: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self = __self
        owner = getattr(__obj, "__self__", None)
        if owner is self:  # what `_Bounds` has put there
            return __obj(*args)
        self._step()
        if len(args) + len(kwargs) > MAX_TEMPLATE_ARGUMENTS:
            raise SecurityError(f"more than {MAX_TEMPLATE_ARGUMENTS} arguments")
        if isinstance(owner, str):
            if __obj.__name__ == "join":
                args = (_bounded(args[0], owner), *args[1:])
            elif __obj.__name__ == "replace":
                _check_replace(owner, *args)
        return self.checked(super().call(__context, __obj, *args, **kwargs))

    def call_filter(self, *args: Any, **kwargs: Any) -> Any:
        """Of each element, in `map`."""
        self._step()
        return self.checked(super().call_filter(*args, **kwargs))

    def call_test(self, *args: Any, **kwargs: Any) -> Any:
        """Of each element, in `select` and `reject`."""
        self._step()
        return super().call_test(*args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatting = super().wrap_str_format(value)
        if formatting is None:
            return None

        def run(*args: Any, **kwargs: Any) -> str:
            _check_format(value.__self__, self._weigh(args) + self._weigh(kwargs))
            return formatting(*args, **kwargs)

        return run

    def _weigh(self, value: Any) -> int:
        """Characters of a value, written out: parts that are shared count each time."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return 0
        known = self._weights.get(id(value))
        if known is not None:
            return known[1]
        weight = len(value) * ELEMENT_CHARS
        _check_size(weight)
        parts = chain(value, value.values()) if isinstance(value, dict) else value
        weight += sum(map(self._weigh, parts))
        self._weights[id(value)] = value, weight
        return weight


# --- the code of a template ----------------------------------------------------------------------


class _Bounds(NodeTransformer):
    """Puts the calls of the budget into a template. They read the environment, not variables, so
    that a template cannot shadow them."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("next_step")))
        if node.test is not None:
            node.test = nodes.And(nodes.EnvironmentAttribute("next_step"), node.test)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(nodes.EnvironmentAttribute("next_step")))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_all", *node.nodes)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        is_constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if is_constant else _call("checked", node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx == "store" else _call("checked", node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _call("checked", node) if node.items else node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _call("checked", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        self.generic_visit(node)
        return node if node.node is None else _call("checked", node)


def _call(name: str, *args: nodes.Expr) -> nodes.Call:
    """Of a method of the environment."""
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


class _GenerationBlocks(Extension):
    """`{% generation %}…{% endgeneration %}` marks a trainer's loss mask; here it is its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012  (the base class declares an instance variable)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# --- sizes ---------------------------------------------------------------------------------------


def _check_size(num_chars: int) -> None:
    if num_chars > MAX_TEMPLATE_OUTPUT_CHARS:
        raise SecurityError(f"more than {MAX_TEMPLATE_OUTPUT_CHARS} characters")


def _check_replace(text: str, old: str, new: str, count: int = -1) -> None:
    _check_size(len(text) + text.count(old) * len(new))


def _check_format(text: str, weight: int) -> None:
    """`weight`: of all arguments, which each field might show."""
    if PADDING.search(text):
        raise SecurityError("a format with a width of thousands, or with one from its arguments")
    _check_size((text.count("%") + text.count("{")) * (weight + 1000))


def _bounded(parts: Iterable[Any], separator: str = "") -> list[str]:
    """Texts that may be joined."""
    texts = []
    num_chars = 0
    for part in parts:
        texts.append(str(part))
        num_chars += len(texts[-1]) + len(separator)
        _check_size(num_chars)
    return texts


# --- functions and filters -----------------------------------------------------------------------


class _Namespace(Namespace):
    """Namespaces may contain each other, so they are not written out."""

    def __repr__(self) -> str:
        return "<Namespace>"


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:  # noqa: A002  (the name that templates use)
    return datetime.datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the HTML escapes of Jinja's own filter."""
    if indent is not None and not 0 <= indent <= MAX_TEMPLATE_EXPONENT:
        raise SecurityError(f"indent must be from 0 to {MAX_TEMPLATE_EXPONENT}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@pass_environment
def _join(
    environment: Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return str(d).join(_bounded(value, str(d)))


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    _check_replace(str(text), str(old), str(new))
    return str(text).replace(str(old), str(new), -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    num_chars = len(width) if isinstance(width, str) else width
    _check_size(len(text) + (text.count("\n") + 1) * num_chars)
    return do_indent(text, width, first, blank)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > MAX_TEMPLATE_EXPONENT:
        raise SecurityError(f"precision above {MAX_TEMPLATE_EXPONENT}")
    return do_round(value, precision, method)


@pass_environment
def _format(environment: TemplateEnvironment, text: Any, *args: Any, **kwargs: Any) -> str:
    return str(environment.percent(str(text), kwargs or args))


FILTERS: Final[dict[str, Callable[..., Any]]] = {
    **{name: JINJA_FILTERS[name] for name in HARMLESS_FILTERS.split()},
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "tojson": _tojson,
}
