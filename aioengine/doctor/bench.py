"""What a rank's device thread does in an examination: open the device, time the groups."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

from aioengine.dist.groups import GroupCoordinator
from aioengine.dist.worlds import (
    GroupOptions,
    Groups,
    ReplicaStore,
    ServedStore,
    connect_store,
    open_replica_groups,
)
from aioengine.doctor.messages import LARGE_BYTES, LATENCY_BYTES, Device, Timing
from aioengine.errors import StartupError
from aioengine.handshake_messages import Endpoint
from aioengine.rank.place import Place
from aioengine.worker.device import device_id, select_device, set_cpu_threads

FLOAT_BYTES: Final = 4
SECONDS_PER_TIMING: Final = 0.25
MIN_REPEATS: Final = 3
MAX_REPEATS: Final = 500
MATMUL_SIZES: Final = {"cpu": 512, "cuda": 4096}
"""Rows and columns: some milliseconds of work."""
MATMUL_SECONDS: Final = 0.15

Operation = Callable[[Tensor], object]


class DeviceBench:
    """One rank's device and groups. All methods block and belong on the device thread."""

    def __init__(self, place: Place) -> None:
        self.doing = "nothing"
        """What the thread is in; read from the loop's thread."""
        self._place = place
        self._store: ReplicaStore | None = None
        self._device = torch.device("cpu")

    @torch.inference_mode()
    def open_device(self) -> Device:
        """Select the device as the engine would; a StartupError becomes `Device.error`."""
        self.doing = "opening the device"
        env, config = self._place.env, self._place.config
        try:
            device = self._device = select_device(config.device, env.local_rank)
        except StartupError as error:
            return no_device(str(error))
        threads = set_cpu_threads(
            config.cpu_threads, env.omp_num_threads, env.local_rank, env.local_world_size
        )
        self.doing = f"multiplying matrices on {device}"
        free, total = _memory(device)
        report = Device(
            name=_device_name(device),
            device_id=device_id(device),
            num_threads=threads,
            memory_free=free,
            memory_total=total,
            matmul_ms=_time_matmul(device),
        )
        self.doing = "nothing"
        return report

    def open_store(self, host: str) -> int:
        """Serve the store of the replica's groups; its port."""
        self.doing = "opening the store of the groups"
        self._store = ServedStore(host)
        self.doing = "nothing"
        return self._store.port

    @torch.inference_mode()
    def measure(self, store: Endpoint, limit_s: float) -> tuple[Timing, ...]:
        """Build the groups of the replica and time them; all its ranks do so at the same time."""
        self.doing = "building the process groups"
        if self._store is None:
            self._store = connect_store(store.host, store.port, limit_s)
        options = GroupOptions(
            device=self._device,
            timeout_s=limit_s,
            node=self._place.env.node,
            num_local_ranks=self._place.env.local_world_size,
            custom_all_reduce=not self._place.config.disable_custom_all_reduce,
        )
        groups = open_replica_groups(self._place.layout, self._place.rank, self._store, options)
        timings = tuple(self._time_groups(groups))
        self.doing = "closing the process groups"
        groups.close()
        self.doing = "nothing"
        return timings

    def _time_groups(self, groups: Groups) -> Iterator[Timing]:
        for group in (groups.tp, groups.dcp, groups.pcp, groups.pp, groups.feedback):
            if group is None or group.world_size == 1:
                continue
            for backend in group.communicator.names:
                self.doing = f"all_reduce over {backend} in group {group.name}"
                yield _timing(group, "all_reduce", backend, tuple(range(group.world_size)))
            if group is groups.pp:
                # Sends go through the library below the shortcuts.
                for pair in itertools.pairwise(range(group.world_size)):
                    self.doing = f"send from stage {pair[0]} to {pair[1]} and back"
                    timing = _timing(group, "send", group.communicator.names[-1], pair)
                    if group.rank_in_group in pair:
                        yield timing


def _timing(group: GroupCoordinator, name: str, backend: str, members: tuple[int, ...]) -> Timing:
    """Every member of the group calls it; those outside `members` only keep step."""
    seconds = []
    for num_bytes in (LATENCY_BYTES, LARGE_BYTES):
        x = torch.zeros(num_bytes // FLOAT_BYTES, device=group.device)
        operation = (
            _all_reduce_through(group, backend, x)
            if name == "all_reduce"
            else _there_and_back(group, members)
        )
        seconds.append(_median_s(group, operation, x, members[0]) if operation else None)
    small_s, large_s = seconds
    if name == "send":
        small_s, large_s = (s / 2 if s else None for s in (small_s, large_s))
    return Timing(
        group=group.name,
        ranks=tuple(group.ranks[member] for member in members),
        operation=name,
        backend=backend,
        latency_us=round(small_s * 1e6, 1) if small_s else None,
        gb_per_s=round(LARGE_BYTES / large_s / 1e9, 3) if large_s else None,
    )


def _all_reduce_through(group: GroupCoordinator, backend: str, x: Tensor) -> Operation | None:
    """One backend of the group's dispatch chain; None when it does not take such a tensor.

    The only place of the doctor that looks into a communicator.
    """
    for candidate in group.communicator.backends:
        if candidate.name == backend and candidate.accepts("all_reduce", x):
            return candidate.all_reduce
    return None


def _there_and_back(group: GroupCoordinator, pair: tuple[int, ...]) -> Operation:
    me, (first, second) = group.rank_in_group, pair

    def operation(x: Tensor) -> None:
        if me == first:
            group.isend(x, second).wait()
            group.irecv(x, second).wait()
        elif me == second:
            group.irecv(x, first).wait()
            group.isend(x, first).wait()

    return operation


def _median_s(group: GroupCoordinator, operation: Operation, x: Tensor, timer: int) -> float:
    """Of as many repeats as fit the time; the member `timer` says how many, for all of them."""
    operation(x)
    group.barrier()
    once = torch.tensor([min(_run_s(operation, x) for _ in range(3))], device=group.device)
    group.broadcast(once, timer)
    repeats = int(SECONDS_PER_TIMING / max(once.item(), 1e-6))
    times = [_run_s(operation, x) for _ in range(min(MAX_REPEATS, max(MIN_REPEATS, repeats)))]
    return statistics.median(times)


def _run_s(operation: Operation, x: Tensor) -> float:
    began = time.perf_counter()
    operation(x)
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - began


def _time_matmul(device: torch.device) -> float:
    """Best time in ms of a product of fixed size: what this device gives when nothing disturbs."""
    size = MATMUL_SIZES[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    x = torch.ones(size, size, device=device, dtype=dtype)
    _run_s(lambda x: x @ x, x)
    end, best = time.perf_counter() + MATMUL_SECONDS, float("inf")
    while time.perf_counter() < end:
        best = min(best, _run_s(lambda x: x @ x, x))
    return round(best * 1e3, 3)


def _memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of an accelerator."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return f"{device} {torch.cuda.get_device_name(device)}"


def no_device(reason: str) -> Device:
    """The report of a rank that cannot open its device."""
    return Device(
        name="none",
        device_id="",
        num_threads=0,
        memory_free=0,
        memory_total=0,
        matmul_ms=0.0,
        error=reason,
    )
