"""What a rank does with the others of one process group. Device thread only.

`worlds.py` builds the groups. Coordinators speak of global ranks, but for sources and targets,
which are ranks in the group.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aioengine.activity import Activity
from aioengine.dist import ops
from aioengine.dist.communicators import Capture, Communicator
from aioengine.dist.plain_values import broadcast_value
from aioengine.dist.tensor_dict import ReceivedDict, SentDict, TensorDictLink, broadcast_dict
from aioengine.errors import EngineError
from aioengine.timeline.probe import Kind, Probe


@dataclass(frozen=True, slots=True)
class Transfer:
    """A send or receive in flight; keeps its tensor alive, as an unfinished one must be kept."""

    work: dist.Work
    tensor: Tensor
    activity: Activity
    name: str
    """What `activity` shows while the transfer is waited for."""

    def wait(self) -> Tensor:
        """Blocks (on CUDA: the stream) until done; RuntimeError when the group's time-out ends."""
        activity = self.activity
        activity.operation = activity.last_operation = self.name
        self.work.wait()
        activity.operation = None
        return self.tensor


@dataclass(frozen=True, slots=True)
class Transport:
    """What a group of two or more ranks moves data with. The coordinator owns it all."""

    device_group: dist.ProcessGroup
    """gloo or NCCL, by device."""
    cpu_group: dist.ProcessGroup
    """gloo; the device group itself where the device is the CPU."""
    communicator: Communicator
    dicts: TensorDictLink

    def close(self) -> None:
        self.dicts.close()
        self.communicator.close()
        dist.destroy_process_group(self.device_group)
        if self.cpu_group is not self.device_group:
            dist.destroy_process_group(self.cpu_group)


class GroupCoordinator:
    """This rank's line of one axis. All members call collectives in the same order.

    `name` is equal on all members: axis and a number per process. `ranks` are global. A group of
    one has nothing behind it, and its collectives return their input. Nor has a group that only
    carries ranks: replicas of a dense model share nothing at run time.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        rank: int,
        *,
        device: torch.device,
        transport: Transport | None = None,
    ) -> None:
        self.name = name
        self.ranks = ranks
        self.rank_in_group = ranks.index(rank)
        self.world_size = len(ranks)
        self.device = device
        self._transport = transport
        self._sends = [f"send to rank {other} on {name}" for other in ranks]
        self._receives = [f"recv from rank {other} on {name}" for other in ranks]
        if transport is not None:
            ops.register_group(name, transport.communicator)

    @property
    def communicator(self) -> Communicator:
        return self._open.communicator

    @property
    def device_group(self) -> dist.ProcessGroup:
        """gloo or NCCL, by device."""
        return self._open.device_group

    @property
    def cpu_group(self) -> dist.ProcessGroup:
        """gloo."""
        return self._open.cpu_group

    # --- collectives

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the group, as a new tensor (x itself in a group of one)."""
        return x if self.world_size == 1 else ops.all_reduce(x, self.name)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Every member's x joined along `dim` in rank order (x itself in a group of one)."""
        return x if self.world_size == 1 else ops.all_gather(x, dim, self.name)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This member's part, along `dim`, of the sum (x itself in a group of one).

        ValueError when the group does not divide `dim`.
        """
        return x if self.world_size == 1 else ops.reduce_scatter(x, dim, self.name)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Overwrites x with that of the member `source`; returns x."""
        if self.world_size > 1:
            self._open.communicator.broadcast(x, source)
        return x

    def broadcast_object(self, value: Any, source: int) -> Any:
        """The plain value of the member `source`; the others pass None.

        Raises TypeError for what is not plain (`plain_values.py`).
        """
        if self.world_size == 1:
            return value
        with self._operating("broadcast of an object"):
            return broadcast_value(value, source, self._open.cpu_group)

    def broadcast_tensor_dict(
        self, values: Mapping[str, Any] | None, source: int
    ) -> Mapping[str, Any]:
        """The tensors and plain values of the member `source`; the others pass None.

        Tensors arrive where they were: on the CPU, or on the group's device. TypeError, on the
        source, names the key of what cannot travel.
        """
        if self.world_size == 1:
            assert values is not None, "the source of a broadcast has the values"
            return values
        transport = self._open
        with self._operating("broadcast of a tensor dict"):
            return broadcast_dict(
                values,
                source,
                device=self.device,
                cpu_group=transport.cpu_group,
                device_group=transport.device_group,
            )

    def enter_job(self, seq: int) -> None:
        """What follows belongs to this job of the replica's sequence."""
        if self.world_size > 1:
            self.communicator.enter_job(seq)

    def set_capture(self, capture: Capture | None) -> None:
        """Have collectives noted, until None is set."""
        if self.world_size > 1:
            self.communicator.set_capture(capture)

    def barrier(self) -> None:
        if self.world_size > 1:
            with self._operating("barrier"):
                dist.barrier(group=self._open.cpu_group)

    # --- from one member to another

    def isend(self, x: Tensor, target: int) -> Transfer:
        """Starts sending contiguous x to the member `target`."""
        work = dist.isend(x, group=self._open.device_group, group_dst=target)
        assert work is not None
        return Transfer(work, x, self._open.communicator.activity, self._sends[target])

    def irecv(self, into: Tensor, source: int) -> Transfer:
        """Starts receiving into contiguous `into`, which must have the sender's shape and type."""
        # NCCL matches by order alone: a dict whose receive is still to be posted would be mixed up.
        assert self.device.type == "cpu" or not self._open.dicts.awaits(source), (
            "wait for the tensor dict from that member first"
        )
        work = dist.irecv(into, group=self._open.device_group, group_src=source)
        assert work is not None
        return Transfer(work, into, self._open.communicator.activity, self._receives[source])

    def isend_tensor_dict(self, values: Mapping[str, Any], target: int) -> SentDict:
        """Starts sending tensors (on the CPU or the group's device) and plain values.

        They are copied, so the caller may write to them at once, and may drop the handle; waiting
        for it means waiting until the receiver waits. TypeError names the key of what cannot
        travel. At most `MAX_DICTS_IN_FLIGHT` to one member: one more waits for the oldest.
        """
        return self._open.dicts.isend(values, target)

    def irecv_tensor_dict(self, source: int) -> ReceivedDict:
        """The next dict from the member `source`, received when somebody waits for it."""
        return self._open.dicts.irecv(source)

    # --- start and end

    def probes(self) -> list[Probe]:
        """The collectives of a step."""
        if self.world_size == 1:
            return []
        return [
            Probe(self, "all_reduce", Kind.ALL_REDUCE),
            Probe(self, "all_gather", Kind.ALL_GATHER),
            Probe(self, "reduce_scatter", Kind.REDUCE_SCATTER),
            Probe(self, "broadcast", Kind.BROADCAST),
        ]

    def exercise(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Something tiny on every path to be used: each backend, and each (from, to) pair.

        Connections are made here, so that nothing needs the store once the replica is ready.
        """
        if self.world_size == 1:
            return
        self.barrier()
        self._open.communicator.exercise(self.device)
        me, transfers = self.rank_in_group, []
        for source, target in pairs:
            if me == source:
                transfers.append(self.isend(torch.ones(1, device=self.device), target))
            elif me == target:
                transfers.append(self.irecv(torch.zeros(1, device=self.device), source))
        for transfer in transfers:
            assert transfer.wait().item() == 1.0

    def close(self) -> None:
        """Waits for dicts that were sent and frees the name; later calls raise EngineError."""
        if self._transport is not None:
            ops.unregister_group(self.name)
            self._transport.close()
            self._transport = None

    def _operating(self, operation: str) -> AbstractContextManager[None]:
        return self._open.communicator.activity.operating(f"{operation} of {self._label}")

    @property
    def _label(self) -> str:
        return f"{self.name} [ranks {', '.join(map(str, self.ranks))}]"

    @property
    def _open(self) -> Transport:
        if self._transport is None:
            raise EngineError(
                f"group {self._label} moves no data: it is closed, has one rank, or belongs to "
                "replicas that share nothing"
            )
        return self._transport
