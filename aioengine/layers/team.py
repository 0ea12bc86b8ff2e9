"""The threads that work on compiled CPU kernels together, as layers and worker see them.

`kernels.team` is the one implementation. It is imported only when a team is opened, so that
everything else works where numba cannot be loaded.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

log = logging.getLogger(__name__)


class Op(Protocol):
    """See kernels.programs.Op."""


class Program(Protocol):
    """See kernels.programs.Program."""

    num_calls: int

    @property
    def position(self) -> int: ...

    def add_op(self, op: Any, args: Sequence[float]) -> None: ...

    def add_compiled(
        self, function: Any, ints: Sequence[int], on_failure: Callable[[int], None]
    ) -> None: ...

    def finish(self) -> None: ...

    def replay(self, times: Any = None) -> None: ...


class Team(Protocol):
    """See kernels.team.Team."""

    num_threads: int
    capture: Any

    def run(self, kernel: int, args: int, num_chunks: int) -> None: ...

    def wake(self) -> None: ...

    def new_program(self) -> Program: ...

    def close(self) -> None: ...


def open_team(num_threads: int) -> Team | None:
    """None, and a warning, where numba cannot be loaded: torch computes everything then."""
    try:
        module = importlib.import_module("aioengine.kernels.team")
    except ImportError as error:
        log.warning("computing without compiled kernels: %s", error)
        return None
    team: Team = module.Team(num_threads)
    return team
