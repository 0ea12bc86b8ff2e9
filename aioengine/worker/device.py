"""Which device a rank computes on, and with how many threads."""

import os
from typing import Literal

import torch

from aioengine.errors import StartupError


def select_device(choice: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """The device of the rank with this `local_rank` on its node; becomes the thread's current one.

    One visible device is taken by every rank (a launcher that gives each its own); otherwise the
    device's number is `local_rank`. Raises StartupError with what was found.
    """
    if choice == "cpu" or (choice == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        raise StartupError("--device cuda: torch finds no CUDA device on this host")
    if count > 1 and local_rank >= count:
        raise StartupError(
            f"local rank {local_rank} has no device: this host shows {count} CUDA devices; start "
            f"at most {count} ranks here, or use --device cpu"
        )
    device = torch.device("cuda", 0 if count == 1 else local_rank)
    torch.cuda.set_device(device)
    return device


def device_id(device: torch.device) -> str:
    """Equal for two ranks only if they compute on one accelerator; "cpu" for CPU."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)


def set_cpu_threads(
    cpu_threads: int | None, omp_num_threads: int | None, local_world_size: int
) -> int:
    """Sets how many threads compute on CPU; must run on the thread that computes.

    `--cpu-threads`, else OMP_NUM_THREADS, else this process's cores shared by the node's ranks.
    """
    shared = max(1, len(os.sched_getaffinity(0)) // local_world_size)
    num_threads = cpu_threads or omp_num_threads or shared
    torch.set_num_threads(num_threads)
    return num_threads


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """StartupError when the device cannot compute in this type; emulation does not count."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise StartupError(f"{name} does not compute in bfloat16: use --dtype float16 or float32")
