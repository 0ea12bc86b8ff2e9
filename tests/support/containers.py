"""How many things the containers of the engine's objects hold, attribute by attribute."""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from queue import SimpleQueue
from typing import Any

CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)


def container_sizes(*roots: object) -> Counter[str]:
    """Elements by "Class.attribute", of everything of aioengine that is reachable from `roots`
    through attributes and containers. What containers hold counts for the attribute, too."""
    sizes: Counter[str] = Counter()
    seen: set[int] = set()
    left: list[tuple[str, Any]] = [("root", root) for root in roots]
    while left:
        name, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, asyncio.Queue | SimpleQueue):
            sizes[name] += value.qsize()
        elif isinstance(value, CONTAINERS):
            sizes[name] += len(value)
            left += [(name, element) for element in _elements(value)]
        elif type(value).__module__.startswith("aioengine"):
            left += [(f"{type(value).__name__}.{attr}", v) for attr, v in _attributes(value)]
    return sizes


def _elements(container: Any) -> Iterable[Any]:
    if isinstance(container, Mapping):
        return [*container.keys(), *container.values()]
    return list(container)


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for attr in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, attr):
                yield attr, getattr(value, attr)
