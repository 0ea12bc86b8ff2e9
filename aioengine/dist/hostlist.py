"""Slurm's short forms: hosts such as `gpu[01-04,7],x[1-2]n[3-4]`, tasks per node such as `2(x3),1`.

A host list is host patterns between commas; a pattern is text and brackets, a bracket numbers and
ranges between commas. Numbers have at least as many digits as the first one of their range, so
`[08-10]` is 08, 09, 10. Of two brackets the second changes faster, as in `scontrol show hostnames`
(which has an order of its own for three). Everything is checked when it is read; hosts are made
only when asked for.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

MAX_HOSTS: Final = 2**20
"""A list of more is taken for a mistake."""
_TEXT: Final = re.compile(r"[^\[\],\s]+")
_NUMBERS: Final = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?(?![0-9-])")
_TASKS: Final = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?(?=,|\Z)")


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers first … last, written with at least `width` digits."""

    first: int
    last: int
    width: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __iter__(self) -> Iterator[str]:
        return (f"{number:0{self.width}}" for number in range(self.first, self.last + 1))


Bracket: TypeAlias = tuple[Numbers, ...]
Pattern: TypeAlias = tuple[str | Bracket, ...]


@dataclass(frozen=True, slots=True)
class HostList:
    """Hosts in the order in which Slurm counts them; iterating makes one name at a time."""

    patterns: tuple[Pattern, ...]

    @property
    def first(self) -> str:
        return next(iter(self))

    def __len__(self) -> int:
        return sum(_num_hosts(pattern) for pattern in self.patterns)

    def __iter__(self) -> Iterator[str]:
        return (host for pattern in self.patterns for host in _hosts(pattern))


def parse_hosts(text: str) -> HostList:
    """Raises ValueError with the text and the position (from 1) of what is wrong."""
    patterns: list[Pattern] = []
    pattern: list[str | Bracket] = []
    at = 0
    while True:
        following = text[at : at + 1]
        if match := _TEXT.match(text, at):
            pattern.append(match[0])
            at = match.end()
        elif following == "[":
            bracket, at = _parse_bracket(text, at)
            pattern.append(bracket)
        elif pattern and following in ("", ","):
            patterns.append(tuple(pattern))
            if not following:
                break
            pattern = []
            at += 1
        else:
            _refuse("host list", text, at, "a host name was expected")
    num_hosts = sum(map(_num_hosts, patterns))
    if num_hosts > MAX_HOSTS:
        raise ValueError(f"host list {text!r} names {num_hosts} hosts, more than {MAX_HOSTS}")
    return HostList(tuple(patterns))


def _parse_bracket(text: str, start: int) -> tuple[Bracket, int]:
    """The bracket that opens at `start`, and the position after it."""
    numbers = []
    at = start + 1
    while True:
        if (match := _NUMBERS.match(text, at)) is None:
            _refuse("host list", text, at, "a number or a range of two was expected")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            _refuse("host list", text, at, f"the range {match[0]} runs backwards")
        numbers.append(Numbers(first, last, len(match[1])))
        at = match.end()
        following = text[at : at + 1]
        at += 1
        if following == "]":
            return tuple(numbers), at
        if following != ",":
            reason = f"',' or ']' was expected in the bracket of position {start + 1}"
            _refuse("host list", text, at - 1, reason)


def _num_hosts(pattern: Pattern) -> int:
    return math.prod(sum(map(len, part)) for part in pattern if not isinstance(part, str))


def _hosts(pattern: Pattern) -> Iterator[str]:
    if not pattern:
        yield ""
        return
    part, *rest = pattern
    for head in [part] if isinstance(part, str) else (text for run in part for text in run):
        for tail in _hosts(tuple(rest)):
            yield head + tail


@dataclass(frozen=True, slots=True)
class TaskCounts:
    """(tasks, number of nodes in a row that have so many), in node order."""

    runs: tuple[tuple[int, int], ...]

    @property
    def num_tasks(self) -> int:
        return sum(tasks * repeats for tasks, repeats in self.runs)

    @property
    def num_nodes(self) -> int:
        return sum(repeats for _, repeats in self.runs)

    def on_node(self, node: int) -> int:
        """Tasks on a node of the list, counted from 0."""
        for tasks, repeats in self.runs:
            if node < repeats:
                return tasks
            node -= repeats
        raise IndexError(node)


def parse_task_counts(text: str) -> TaskCounts:
    """Raises ValueError with the text and the position (from 1) of what is wrong."""
    runs = []
    at = 0
    while True:
        if (match := _TASKS.match(text, at)) is None:
            _refuse("task counts", text, at, "a number such as 4 or 4(x2) was expected")
        runs.append((int(match[1]), int(match[2] or 1)))
        at = match.end() + 1
        if at > len(text):
            return TaskCounts(tuple(runs))


def _refuse(what: str, text: str, at: int, reason: str) -> NoReturn:
    raise ValueError(f"malformed {what} {text!r} at position {at + 1}: {reason}")
