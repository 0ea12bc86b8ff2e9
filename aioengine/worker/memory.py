"""How much memory is free, and how many KV blocks that makes. Bytes throughout."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from aioengine.config import EngineConfig
from aioengine.errors import StartupError

CPU_SHARE: Final = 0.25
"""Of a node's free memory, for the KV caches of all its ranks."""
MAX_CPU_BYTES: Final = 4 * 2**30
"""Of one rank's KV cache on CPU, unless --kv-cache-memory-bytes says otherwise."""

_CGROUPS: Final = Path("/sys/fs/cgroup")


def kv_budget(config: EngineConfig, device: torch.device, local_world_size: int) -> int:
    """Bytes for the KV cache of this rank. On CUDA: after a forward pass of the largest size."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if device.type == "cuda":
        return _free_cuda_bytes(config.gpu_memory_utilization)
    return min(int(_free_cpu_bytes() * CPU_SHARE) // local_world_size, MAX_CPU_BYTES)


def num_kv_blocks(
    config: EngineConfig, *, budget: int, block_bytes: int, max_model_len: int
) -> int:
    """Blocks of one rank that fit `budget`, the null block included.

    Not more than all requests at full length need, unless --kv-cache-memory-bytes asks for it.
    Raises StartupError with the numbers when not even one request fits.
    """
    per_request = -(-max_model_len // config.block_size)
    fitting = budget // block_bytes
    least = 1 + (per_request if config.max_model_len is not None else 1)
    if fitting < least:
        wanted = (
            f"one request of --max-model-len {max_model_len}"
            if config.max_model_len is not None
            else "a single block"
        )
        raise StartupError(
            f"{wanted} needs {least * block_bytes} bytes of KV cache ({least} blocks of "
            f"{block_bytes} bytes, the null block included), but only {budget} are available; "
            "lower --max-model-len or raise --kv-cache-memory-bytes"
        )
    if config.kv_cache_memory_bytes is not None:
        return fitting
    return min(fitting, 1 + config.num_slots * per_request)


def _free_cuda_bytes(utilization: float) -> int:
    """The part of the device we may use, less what is in use and what the largest step needs."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    step_bytes = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    return int(total * utilization) - (total - free) - step_bytes


def _free_cpu_bytes() -> int:
    """What the kernel can give without swapping, within the limits of our control groups."""
    meminfo = Path("/proc/meminfo").read_text()
    fields = dict(line.split(":", 1) for line in meminfo.splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min([available, *_cgroup_rooms()])


def _cgroup_rooms() -> Iterator[int]:
    """Bytes left below the limit of each control group (version 2) that holds this process."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy != "0":
            continue
        group = _CGROUPS / path.lstrip("/")
        for directory in (group, *group.parents):
            limit = directory / "memory.max"
            if not limit.is_file():
                continue
            text = limit.read_text().strip()
            if text != "max":
                yield max(0, int(text) - _cgroup_used(directory))


def _cgroup_used(directory: Path) -> int:
    """Without file pages that the kernel would drop first."""
    fields = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    return int((directory / "memory.current").read_text()) - int(fields["inactive_file"])
