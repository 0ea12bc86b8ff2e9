"""Which backends a group gets, in dispatch order, and what the log says about them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from aioengine.dist.communicators import CollectiveBackend
from aioengine.dist.process_groups import GlooBackend, NcclBackend
from aioengine.dist.shared_memory import open_shared_memory
from aioengine.dist.symmetric_memory import open_symmetric_memory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSite:
    """A group of two or more ranks, and where this rank stands in it, when backends are opened."""

    name: str
    ranks: tuple[int, ...]
    """Global, in the group's order."""
    rank: int
    """This one, global."""
    device: torch.device
    node: str
    """The launcher's name for this rank's host."""
    num_local_ranks: int
    """On that node, of all groups."""
    timeout_s: float
    """Bounds each operation."""
    device_group: dist.ProcessGroup
    cpu_group: dist.ProcessGroup


Opener: TypeAlias = Callable[[GroupSite], CollectiveBackend | str]
"""Gives a backend, or why there is none: the same on every rank. All ranks of the group call it at
the same time."""


def _open_shared_memory(site: GroupSite) -> CollectiveBackend | str:
    return open_shared_memory(
        site.cpu_group,
        group=site.name,
        ranks=site.ranks,
        rank=site.rank,
        node=site.node,
        num_local_ranks=site.num_local_ranks,
        timeout_s=site.timeout_s,
    )


def _open_symmetric_memory(site: GroupSite) -> CollectiveBackend | str:
    return open_symmetric_memory(site.device, site.node, site.device_group, site.cpu_group)


CUSTOM_BACKENDS: Final[dict[str, list[tuple[str, Opener]]]] = {
    "cpu": [("shm", _open_shared_memory)],
    "cuda": [("symm_mem", _open_symmetric_memory)],
}
"""By device type: what is tried before the library's own, in dispatch order."""


def open_backends(site: GroupSite, *, no_custom_because: str | None) -> list[CollectiveBackend]:
    """The dispatch chain of a group, whose members call this together.

    `no_custom_because` rules out the custom ones. The first rank logs each refusal, and the chain.
    """
    speaks = site.rank == site.ranks[0]
    backends: list[CollectiveBackend] = []
    for custom, opener in CUSTOM_BACKENDS[site.device.type]:
        opened = no_custom_because or opener(site)
        if not isinstance(opened, str):
            backends.append(opened)
        elif speaks:
            logger.info("group %r goes without %s: %s", site.name, custom, opened)
    library = NcclBackend if site.device.type == "cuda" else GlooBackend
    backends.append(library(site.device_group))
    if speaks:
        logger.info(
            "Using %s all-reduce backends (in dispatch order) for group %r [ranks %s]",
            [backend.name for backend in backends],
            site.name,
            ", ".join(map(str, site.ranks)),
        )
    return backends
