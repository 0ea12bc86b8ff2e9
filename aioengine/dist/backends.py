"""Which backends a group gets, in dispatch order, and what the log says about them."""

import logging
from collections.abc import Callable
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from aioengine.dist.communicators import CollectiveBackend
from aioengine.dist.process_groups import GlooBackend, NcclBackend
from aioengine.dist.symmetric_memory import open_symmetric_memory

logger = logging.getLogger(__name__)

Opener: TypeAlias = Callable[
    [torch.device, str, dist.ProcessGroup, dist.ProcessGroup], CollectiveBackend | str
]
"""(device, launcher node, device group, cpu group) -> a backend, or why there is none, the same on
every rank. All ranks of the group call it at the same time."""

CUSTOM_BACKENDS: Final[dict[str, list[tuple[str, Opener]]]] = {
    "cpu": [],
    "cuda": [("symm_mem", open_symmetric_memory)],
}
"""By device type: what is tried before the library's own, in dispatch order."""


def open_backends(
    name: str,
    ranks: tuple[int, ...],
    *,
    device: torch.device,
    node: str,
    device_group: dist.ProcessGroup,
    cpu_group: dist.ProcessGroup,
    no_custom_because: str | None,
) -> list[CollectiveBackend]:
    """The dispatch chain of a group of two or more ranks, whose members call this together.

    `no_custom_because` rules out the custom ones. The first rank logs each refusal, and the chain.
    """
    speaks = cpu_group.rank() == 0
    backends: list[CollectiveBackend] = []
    for custom, opener in CUSTOM_BACKENDS[device.type]:
        opened = no_custom_because or opener(device, node, device_group, cpu_group)
        if not isinstance(opened, str):
            backends.append(opened)
        elif speaks:
            logger.info("group %r goes without %s: %s", name, custom, opened)
    library = NcclBackend if device.type == "cuda" else GlooBackend
    backends.append(library(device_group))
    if speaks:
        logger.info(
            "Using %s all-reduce backends (in dispatch order) for group %r [ranks %s]",
            [backend.name for backend in backends],
            name,
            ", ".join(map(str, ranks)),
        )
    return backends
