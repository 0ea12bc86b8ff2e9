"""The repository's Python files as text, and what they mention."""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Source:
    """One Python file; `path` is relative to the repository, with forward slashes."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def is_ours(self) -> bool:
        """Part of the product, not a test."""
        return not self.path.startswith("tests/")

    @property
    def part(self) -> str:
        """The MAY_IMPORT key of a file, or "" outside the package."""
        match self.path.split("/"):
            case ["aioengine", "launch.py"]:
                return "launch"
            case ["aioengine", "__init__.py"]:
                return "public"
            case ["aioengine", _]:
                return "root"
            case ["aioengine", package, *_]:
                return package
        return ""


Findings = Iterator[tuple[int, str]]
Check = Callable[[Source], Findings]


@cache
def read_sources() -> list[Source]:
    return [
        Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for top in ("aioengine", "launch", "tests")
        for path in sorted((ROOT / top).rglob("*.py"))
    ]


# --- what a file mentions ----------------------------------------------------------------------


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported; `from a import b` counts as "a.b"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def origins(tree: ast.Module) -> dict[str, str]:
    """What the names that imports bind stand for, where that is another name."""
    origin: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            origin |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            origin |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return origin


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every name used, with the import that it came from put in front."""
    origin = origins(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            yield node.lineno, resolved(node, origin)
    yield from imports(tree)


def resolved(node: ast.expr, origin: dict[str, str]) -> str:
    head, *rest = dotted(node)
    return ".".join([origin.get(head, head), *rest])


def dotted(node: ast.expr) -> list[str]:
    """["a", "b"] for the expression a.b; what is no name, such as a call, becomes "?"."""
    match node:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value, attr=attr):
            return [*dotted(value), attr]
    return ["?"]


def is_within(name: str, parent: str) -> bool:
    return name == parent or name.startswith(parent + ".")
