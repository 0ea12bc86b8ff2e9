"""How much memory is free, what it must hold, and how many KV blocks that makes."""

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from aioengine.config import EngineConfig
from aioengine.errors import StartupError

CPU_SHARE: Final = 0.25
"""Of a node's free memory, for the KV caches of all its ranks."""
MAX_CPU_BYTES: Final = 4 * 2**30
"""Of one rank's KV cache on CPU, unless --kv-cache-memory-bytes says otherwise."""


@dataclass(frozen=True, slots=True)
class KVBudget:
    """Bytes for one rank's KV cache, and how they came about, for people."""

    num_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a rank computes in, as it was before any rank loaded weights."""

    device: torch.device
    free: int
    num_sharing: int
    """Ranks that share it: all of the node on CPU, one on CUDA."""

    @classmethod
    def measure(cls, device: torch.device, local_world_size: int) -> "Memory":
        if device.type == "cpu":
            return cls(device, free_cpu_bytes(), local_world_size)
        return cls(device, torch.cuda.mem_get_info(device)[0], 1)

    def check_weights(self, needed: int, dtype: torch.dtype) -> None:
        """StartupError with the numbers when this rank's parameters cannot fit."""
        if needed > self.free // self.num_sharing:
            raise StartupError(
                f"the weights of this rank take {gib(needed)} in {dtype}, but {self._shares()}; "
                "use more ranks on more nodes (-tp, -pp) or a narrower --dtype"
            )

    def kv_budget(self, config: EngineConfig) -> KVBudget:
        """After the weights are loaded; on CUDA after a step of the largest size, too."""
        given = config.kv_cache_memory_bytes
        if given is not None:
            if given > self.free // self.num_sharing:
                raise StartupError(
                    f"--kv-cache-memory-bytes {given} ({gib(given)}) for each rank is too much: "
                    f"{self._shares()} before the weights were loaded"
                )
            return KVBudget(given, "--kv-cache-memory-bytes")
        if self.device.type == "cpu":
            return cpu_kv_budget(free_cpu_bytes(), self.num_sharing)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        peak, now = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        return cuda_kv_budget(
            total, free, step_bytes=peak - now, utilization=config.gpu_memory_utilization
        )

    def _shares(self) -> str:
        if self.num_sharing == 1:
            return f"{gib(self.free)} are free on {self.device}"
        return f"the {self.num_sharing} ranks of this node share {gib(self.free)} of free memory"


def cpu_kv_budget(free: int, num_sharing: int) -> KVBudget:
    """A share of what is free, so that the page cache and other programs keep most of it."""
    share = int(free * CPU_SHARE) // num_sharing
    if share > MAX_CPU_BYTES:
        return KVBudget(MAX_CPU_BYTES, "the most that a rank takes on CPU by itself")
    return KVBudget(
        share, f"{CPU_SHARE:.0%} of {gib(free)} free memory over {num_sharing} ranks of this node"
    )


def cuda_kv_budget(total: int, free: int, *, step_bytes: int, utilization: float) -> KVBudget:
    """The part of the device that we may use, less what is in use and what a step needs."""
    used = total - free
    return KVBudget(
        max(0, int(total * utilization) - used - step_bytes),
        f"--gpu-memory-utilization {utilization:g} of {gib(total)}, less {gib(used)} in use and "
        f"{gib(step_bytes)} for the largest step",
    )


def num_kv_blocks(
    config: EngineConfig, *, budget: KVBudget, block_bytes: int, max_model_len: int
) -> int:
    """Blocks of one rank that fit the budget, the null block included.

    Not more than all requests at full length need, unless --kv-cache-memory-bytes asks for it.
    Raises StartupError with the numbers when not even one request fits (a single block, when the
    context may be cut to what fits).
    """
    per_request = -(-max_model_len // config.block_size)
    fitting = budget.num_bytes // block_bytes
    least = 1 + (per_request if config.max_model_len is not None else 1)
    if fitting < least:
        wanted = (
            f"one request of --max-model-len {max_model_len}"
            if config.max_model_len is not None
            else "a single block"
        )
        raise StartupError(
            f"{wanted} needs {least * block_bytes} bytes of KV cache ({least} blocks of "
            f"{block_bytes} bytes, the null block included), but only {budget.num_bytes} are "
            f"available ({budget.reason}); lower --max-model-len or raise --kv-cache-memory-bytes"
        )
    if config.kv_cache_memory_bytes is not None:
        return fitting
    return min(fitting, 1 + config.num_slots * per_request)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def free_cpu_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """What the kernel can give without swapping, within the limits of our control groups."""
    meminfo = (proc / "meminfo").read_text()
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_cgroup_rooms(proc, cgroups)])


def _cgroup_rooms(proc: Path, cgroups: Path) -> Iterator[int]:
    """Bytes left below the limit of each control group that holds this process; both versions."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, limit, usage, droppable = cgroups, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage, droppable = (
                cgroups / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = root / path.lstrip("/")
        for directory in (group, *group.parents):
            if (directory / limit).is_file() and directory.is_relative_to(root):
                text = (directory / limit).read_text().strip()
                if text != "max":
                    stat = (directory / "memory.stat").read_text().splitlines()
                    pages = int(dict(line.split() for line in stat)[droppable])
                    used = int((directory / usage).read_text())
                    yield max(0, int(text) - used + pages)


def give_back_freed() -> None:
    """Return to the system what was freed on the heap: a load leaves there as much as it took for
    its largest tensors. Does nothing where the C library has no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
