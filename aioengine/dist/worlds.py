"""Which process groups a rank is in, and the torch.distributed world that they are built in.

A replica of a dense model that we launched is a world of its own: replicas share nothing at run
time. Mixtures of experts, and engines inside a trainer's torch.distributed, have one world that
holds every replica. torch.distributed counts ranks from the first rank of the world;
`GroupBuilder` is the one place that translates.
"""

import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final, TypeAlias

import torch
import torch.distributed as dist

from aioengine.activity import Activity
from aioengine.dist.backends import GroupSite, open_backends
from aioengine.dist.communicators import Communicator
from aioengine.dist.groups import GroupCoordinator, Transport
from aioengine.dist.tensor_dict import TensorDictLink
from aioengine.errors import EngineError
from aioengine.layout import Axis, ParallelLayout

_DEVICE_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
_POINT_TO_POINT: Final = ("pp", "feedback")
"""Axes on which ranks only send and receive."""
_instances: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of this rank, and whether it made the torch.distributed world they stand in."""

    tp: GroupCoordinator
    dcp: GroupCoordinator
    pcp: GroupCoordinator
    pp: GroupCoordinator
    dp: GroupCoordinator
    """In the world of one replica: ranks and coordinates only."""
    feedback: GroupCoordinator | None
    """Output rank and the ranks that embed, for sampled ids; None on ranks that are neither."""
    experts: tuple[GroupCoordinator, GroupCoordinator] | None
    """ep and eplb; None for a dense model."""
    owns_world: bool
    """False in a trainer's world, and for a replica of one rank, which needs none."""

    @property
    def ep(self) -> GroupCoordinator:
        """All ranks of this stage, over which experts are spread.

        EngineError for a dense model.
        """
        return self._experts("ep")[0]

    @property
    def eplb(self) -> GroupCoordinator:
        """The ranks of `ep`, with a communicator of its own, to move experts beside the steps."""
        return self._experts("eplb")[1]

    def close(self) -> None:
        """On all ranks at about the same time, after their last operation."""
        for group in (
            *(self.tp, self.dcp, self.pcp, self.pp, self.dp),
            *([] if self.feedback is None else [self.feedback]),
            *(self.experts or ()),
        ):
            group.close()
        if self.owns_world:
            dist.destroy_process_group()

    def _experts(self, axis: str) -> tuple[GroupCoordinator, GroupCoordinator]:
        if self.experts is None:
            raise EngineError(
                f"there is no {axis} group: the model is dense, and only a mixture of experts has "
                "experts to spread over the ranks of a stage"
            )
        return self.experts


ReplicaStore: TypeAlias = dist.TCPStore
"""Where the ranks of a replica find each other while they build their groups."""


class ServedStore(dist.TCPStore):
    """Served by this process on an address of its own and a free port (`.port`).

    It answers whoever connects, without a proof; so nobody else should reach it for long.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        self._listen_fd = listener.detach()
        super().__init__(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._listen_fd
        )

    def stop_listening(self) -> None:
        """Who has connected stays. Called once.

        torch cannot do it: its server is given a descriptor on which nothing ever arrives in place
        of the port's, which closes the port.
        """
        nothing = os.eventfd(0, os.EFD_CLOEXEC)
        os.dup2(nothing, self._listen_fd, inheritable=False)
        os.close(nothing)


def connect_store(host: str, port: int, timeout_s: float) -> ReplicaStore:
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOptions:
    """What is the same for all groups of a rank."""

    device: torch.device
    timeout_s: float
    """Bounds each operation."""
    node: str = "0"
    """The launcher's name for this rank's host."""
    num_local_ranks: int = 1
    """Ranks on that host."""
    custom_all_reduce: bool = True
    """False: only the libraries' own collectives (`--disable-custom-all-reduce`)."""
    activity: Activity = field(default_factory=Activity)
    """Shows what the device thread is in."""


def has_world() -> bool:
    """Whether somebody, a trainer, has initialised torch.distributed in this process."""
    return dist.is_initialized()


def open_groups(
    layout: ParallelLayout, rank: int, store: dist.Store | None, options: GroupOptions
) -> Groups:
    """The groups of `rank`, in a trainer's world where there is one, else in its replica's own."""
    if has_world():
        return open_world_groups(layout, rank, store, options, is_mixture=False)
    return open_replica_groups(layout, rank, store, options)


def open_replica_groups(
    layout: ParallelLayout, rank: int, store: dist.Store | None, options: GroupOptions
) -> Groups:
    """Builds and exercises every group of `rank`'s replica of a dense model.

    All ranks of the replica call it at the same time. `store` is the replica's own, and may be
    None for a replica of one rank, which uses no torch.distributed at all.
    """
    if layout.world_size > 1:
        assert store is not None, "a replica of several ranks needs a store"
        _open_world("replica", store, rank - layout.leader_of(rank), layout.world_size, options)
    return _build(layout, rank, options, one_world=False, is_mixture=False)


def open_world_groups(
    layout: ParallelLayout,
    rank: int,
    store: dist.Store | None,
    options: GroupOptions,
    *,
    is_mixture: bool,
) -> Groups:
    """Builds and exercises every group of `rank` in one world of all `layout.launch_world_size`
    ranks, which all call it at the same time.

    torch.distributed, where somebody (a trainer) has initialised it, is used and left alive;
    otherwise the world is made on `store`. Raises ValueError when an existing world has another
    size than the layout or knows this process as another rank.
    """
    exists = dist.is_initialized()
    if exists:
        found = (dist.get_rank(), dist.get_world_size())
        if found != (rank, layout.launch_world_size):
            raise ValueError(
                f"torch.distributed is initialised: this is rank {found[0]} of {found[1]} there, "
                f"but rank {rank} of {layout.launch_world_size} in the layout"
            )
    elif layout.launch_world_size > 1:
        assert store is not None, "a world of several ranks needs a store"
        _open_world("world", store, rank, layout.launch_world_size, options)
    return _build(layout, rank, options, one_world=True, is_mixture=is_mixture, leave_world=exists)


def _open_world(
    prefix: str, store: dist.Store, rank: int, world_size: int, options: GroupOptions
) -> None:
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(prefix, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=options.timeout_s),
    )


def _build(
    layout: ParallelLayout,
    rank: int,
    options: GroupOptions,
    *,
    one_world: bool,
    is_mixture: bool,
    leave_world: bool = False,
) -> Groups:
    """Every axis, in the same order on all ranks of the world; then every path once."""
    world = layout.world_of(rank, one_world=one_world)
    builder = GroupBuilder(world, rank, options)

    def build(axis: Axis) -> GroupCoordinator:
        group = builder.build(axis, _lines(layout, axis, world))
        assert group is not None, f"rank {rank} is on no {axis} line"
        return group

    replicas = world[:: layout.world_size]
    groups = Groups(
        tp=build("tp"),
        dcp=build("dcp"),
        pcp=build("pcp"),
        pp=build("pp"),
        dp=build("dp") if one_world else builder.coordinates("dp", layout.group("dp", rank)),
        feedback=builder.build("feedback", map(layout.feedback_ranks, replicas)),
        experts=(build("ep"), build("eplb")) if is_mixture else None,
        owns_world=len(world) > 1 and not leave_world,
    )
    for group in (groups.tp, groups.dcp, groups.pcp, *(groups.experts or ())):
        group.exercise([])
    if one_world:
        groups.dp.exercise([])
    groups.pp.exercise(itertools.pairwise(range(groups.pp.world_size)))
    if (feedback := groups.feedback) is not None:
        source = feedback.ranks.index(layout.output_rank_of(rank))
        feedback.exercise((source, i) for i in range(feedback.world_size) if i != source)
    return groups


class GroupBuilder:
    """Builds groups of the ranks of one world, in one order on all of them."""

    def __init__(self, world: range, rank: int, options: GroupOptions) -> None:
        self._world = world
        self._rank = rank
        self._options = options
        self._instance = next(_instances)

    def build(self, axis: str, lines: Iterable[tuple[int, ...]]) -> GroupCoordinator | None:
        """This rank's group among `lines`, or None; every rank of the world passes the same."""
        mine = None
        for ranks in lines:
            transport = self._connect(axis, ranks) if len(ranks) > 1 else None
            if self._rank in ranks:
                mine = self._coordinator(axis, ranks, transport)
        return mine

    def coordinates(self, axis: str, ranks: tuple[int, ...]) -> GroupCoordinator:
        """A group that only carries its ranks, some of which are outside this world."""
        return self._coordinator(axis, ranks, None)

    def _coordinator(
        self, axis: str, ranks: tuple[int, ...], transport: Transport | None
    ) -> GroupCoordinator:
        return GroupCoordinator(
            self._name(axis), ranks, self._rank, device=self._options.device, transport=transport
        )

    def _name(self, axis: str) -> str:
        return f"{axis}:{self._instance}"

    def _connect(self, axis: str, ranks: tuple[int, ...]) -> Transport | None:
        """None on ranks of the world that are not in the group; they, too, must call this."""
        device, name = self._options.device, self._name(axis)
        device_group = self._torch_group(ranks, _DEVICE_BACKENDS[device.type], name)
        cpu_group = (
            device_group if device.type == "cpu" else self._torch_group(ranks, "gloo", name)
        )
        if self._rank not in ranks:
            return None
        no_custom_because = None
        if axis in _POINT_TO_POINT:
            no_custom_because = "its ranks only send and receive"
        elif not self._options.custom_all_reduce:
            no_custom_because = "--disable-custom-all-reduce"
        site = GroupSite(
            name=name,
            ranks=ranks,
            rank=self._rank,
            device=device,
            node=self._options.node,
            num_local_ranks=self._options.num_local_ranks,
            timeout_s=self._options.timeout_s,
            device_group=device_group,
            cpu_group=cpu_group,
        )
        backends = open_backends(site, no_custom_because=no_custom_because)
        return Transport(
            device_group,
            cpu_group,
            Communicator(name, ranks, backends, self._options.activity),
            TensorDictLink(device, cpu_group, device_group),
        )

    def _torch_group(self, ranks: tuple[int, ...], backend: str, name: str) -> dist.ProcessGroup:
        """On ranks outside the group: torch's placeholder, which nothing here uses."""
        group: dist.ProcessGroup = dist.new_group(
            [rank - self._world.start for rank in ranks],
            timeout=timedelta(seconds=self._options.timeout_s),
            backend=backend,
            group_desc=name,
        )
        return group


def _lines(layout: ParallelLayout, axis: Axis, world: range) -> Iterator[tuple[int, ...]]:
    """The groups of an axis that lie in `world`, each once."""
    for rank in world:
        line = layout.group(axis, rank)
        if line[0] == rank:
            yield line
