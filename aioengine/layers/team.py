"""The threads that work on compiled CPU kernels together, as layers and worker see them.

`kernels.team` is the one implementation. It is imported only when a team is opened, so that
everything else works where numba cannot be loaded.
"""

import importlib
import logging
from typing import Protocol

log = logging.getLogger(__name__)


class Team(Protocol):
    """See kernels.team.Team."""

    num_threads: int

    def run(self, kernel: int, args: int, num_chunks: int) -> None: ...

    def wake(self) -> None: ...

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
