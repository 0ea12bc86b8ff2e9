"""Which replica gets the next request. Pure: counts in, index out."""

from collections.abc import Sequence


class Router:
    """Least loaded wins, ties rotate."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, loads: Sequence[int | None]) -> int | None:
        """Index of the replica to use; `loads` holds None for those that take no new work."""
        open_loads = [load for load in loads if load is not None]
        if not open_loads:
            return None
        least, count = min(open_loads), len(loads)
        index = next(
            i % count for i in range(self._next, self._next + count) if loads[i % count] == least
        )
        self._next = (index + 1) % count
        return index
