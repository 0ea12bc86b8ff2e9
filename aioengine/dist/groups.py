"""Process groups of one replica, as this rank sees them. Device thread only.

Coordinators and logs speak of global ranks. torch.distributed knows a world that is the replica, so
its ranks start at 0 with the leader; `open_replica_groups` is the one place that translates.
"""

import itertools
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from aioengine.dist import ops
from aioengine.dist.communicators import Communicator, ProcessGroupBackend
from aioengine.layout import ParallelLayout

logger = logging.getLogger(__name__)

_DEVICE_BACKENDS: Final = {"cpu": "gloo", "cuda": "nccl"}
_instances: Final = itertools.count()


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or receive in flight; keeps its tensor alive, as an unfinished one must be kept."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> Tensor:
        """Blocks (on CUDA: the stream) until done; RuntimeError when the group's time-out ends."""
        self.work.wait()
        return self.tensor


class GroupCoordinator:
    """This rank's membership of one group. A group of one has no torch group behind it.

    `name` is equal on all members: axis and a number per process. `ranks` are global.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        *,
        device: torch.device,
        device_group: dist.ProcessGroup | None = None,
        cpu_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.rank_in_group = ranks.index(rank)
        self.size = len(ranks)
        self.device = device
        self.device_group = device_group
        self.cpu_group = cpu_group
        self.communicator: Communicator | None = None
        if device_group is not None:
            self.communicator = Communicator([ProcessGroupBackend(device_group, device.type)])
            ops.register_group(
                name,
                ops.Collectives(
                    self.size, self.communicator.all_reduce, self.communicator.all_gather
                ),
            )
            if self.rank_in_group == 0:
                logger.info(
                    "Using %s all-reduce backends (in dispatch order) for group %r [ranks %s]",
                    self.communicator.names,
                    name,
                    ", ".join(map(str, ranks)),
                )

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the group, as a new tensor (x itself in a group of one)."""
        return x if self.size == 1 else ops.all_reduce(x, self.name)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every member's x joined along `dim` in rank order (x itself in a group of one)."""
        return x if self.size == 1 else ops.all_gather(x, dim, self.name)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrites x with that of the member `source` (a rank in the group); returns x."""
        if self.size > 1:
            dist.broadcast(x, group=self.device_group, group_src=source)
        return x

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.cpu_group)

    def isend(self, x: Tensor, target: int) -> Transfer:
        """Starts sending contiguous x to the member `target` (a rank in the group)."""
        work = dist.isend(x, group=self.device_group, group_dst=target)
        assert work is not None
        return Transfer(work, x)

    def irecv(self, into: Tensor, source: int) -> Transfer:
        """Starts receiving into contiguous `into`, which must have the sender's shape and type."""
        work = dist.irecv(into, group=self.device_group, group_src=source)
        assert work is not None
        return Transfer(work, into)

    def exercise(self, pairs: Iterable[tuple[int, int]]) -> None:
        """One tiny operation on every path to be used: the collectives, and each (from, to) pair.

        Connections are made here, so that nothing needs the store once the replica is ready.
        """
        self.barrier()
        assert self.all_reduce(torch.ones(1, device=self.device)).item() == self.size
        me, transfers = self.rank_in_group, []
        for source, target in pairs:
            if me == source:
                transfers.append(self.isend(torch.ones(1, device=self.device), target))
            elif me == target:
                transfers.append(self.irecv(torch.zeros(1, device=self.device), source))
        for transfer in transfers:
            assert transfer.wait().item() == 1.0

    def close(self) -> None:
        """Frees the name; calls that use it afterwards raise EngineError."""
        if self.communicator is not None:
            ops.unregister_group(self.name)
            self.communicator.close()
            self.communicator = None


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """The groups of this rank, and the torch.distributed world of its replica."""

    tp: GroupCoordinator
    pp: GroupCoordinator
    feedback: GroupCoordinator | None
    """Output rank and the ranks that embed, for sampled ids; None on ranks that are neither."""
    dp: GroupCoordinator
    """Ranks and coordinates only: replicas share no torch group."""
    owns_world: bool
    """False for a replica of one rank, which leaves torch.distributed alone."""

    def close(self) -> None:
        for group in (self.tp, self.pp, self.feedback, self.dp):
            if group is not None:
                group.close()
        if self.owns_world:
            dist.destroy_process_group()


ReplicaStore: TypeAlias = dist.TCPStore
"""Where the ranks of a replica find each other while they build their groups."""


def open_store(host: str) -> ReplicaStore:
    """Served by this process on `host` and a free port (`.port`)."""
    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)


def connect_store(host: str, port: int, timeout_s: float) -> ReplicaStore:
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def open_replica_groups(
    layout: ParallelLayout,
    rank: int,
    store: ReplicaStore | None,
    device: torch.device,
    timeout_s: float,
) -> ReplicaGroups:
    """Builds and exercises every group of `rank`'s replica; all its ranks call it at the same time.

    `store` is the replica's own, and may be None for a replica of one rank, which uses no
    torch.distributed at all. `timeout_s` bounds each later operation.
    """
    if layout.world_size > 1:
        assert store is not None, "a replica of several ranks needs a store"
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("replica", store),
            rank=rank - layout.leader_of(rank),
            world_size=layout.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    builder = _GroupBuilder(layout, rank, device, timeout_s)
    tp = builder.build("tp", layout.groups("tp"))
    pp = builder.build("pp", layout.groups("pp"))
    feedback = builder.build("feedback", [_feedback_ranks(layout, rank)])
    assert tp is not None
    assert pp is not None
    tp.exercise([])
    pp.exercise(itertools.pairwise(range(pp.size)))
    if feedback is not None:
        source = feedback.ranks.index(output_rank(layout, rank))
        feedback.exercise((source, i) for i in range(feedback.size) if i != source)
    dp = GroupCoordinator(f"dp:{builder.instance}", layout.group("dp", rank), rank, device=device)
    return ReplicaGroups(tp, pp, feedback, dp, owns_world=layout.world_size > 1)


class _GroupBuilder:
    """Builds groups in one order on all ranks, and turns global into replica-local ranks."""

    def __init__(
        self, layout: ParallelLayout, rank: int, device: torch.device, timeout_s: float
    ) -> None:
        self.instance = next(_instances)
        self._replica = layout.replica(rank)
        self._rank = rank
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)

    def build(self, axis: str, lines: Iterable[tuple[int, ...]]) -> GroupCoordinator | None:
        """This rank's group among `lines`, or None; every rank must pass the same lines."""
        mine = None
        name = f"{axis}:{self.instance}"
        for ranks in lines:
            if ranks[0] not in self._replica:
                continue
            device_group = cpu_group = None
            if len(ranks) > 1:
                device_group = self._torch_group(ranks, _DEVICE_BACKENDS[self._device.type], name)
                cpu_group = (
                    device_group
                    if self._device.type == "cpu"
                    else self._torch_group(ranks, "gloo", name)
                )
            if self._rank in ranks:
                mine = GroupCoordinator(
                    name,
                    ranks,
                    self._rank,
                    device=self._device,
                    device_group=device_group,
                    cpu_group=cpu_group,
                )
        return mine

    def _torch_group(self, ranks: tuple[int, ...], backend: str, name: str) -> dist.ProcessGroup:
        """On ranks outside the group: torch's placeholder, which nothing here uses."""
        group: dist.ProcessGroup = dist.new_group(
            [rank - self._replica.start for rank in ranks],
            timeout=self._timeout,
            backend=backend,
            group_desc=name,
        )
        return group


def output_rank(layout: ParallelLayout, rank: int) -> int:
    """The global rank that samples in `rank`'s replica."""
    return layout.replica(rank)[layout.output_rank_in_replica]


def _feedback_ranks(layout: ParallelLayout, rank: int) -> tuple[int, ...]:
    """The output rank of `rank`'s replica and all ranks of its first stage, ascending."""
    first_stage = layout.replica(rank)[: layout.pcp_size * layout.tp_size]
    return tuple(sorted({*first_stage, output_rank(layout, rank)}))
