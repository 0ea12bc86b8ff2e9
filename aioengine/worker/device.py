"""Which device a rank computes on; on CPU with how many threads, and on which cores."""

import os
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from aioengine import launched_by
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
    cpu_threads: int | None, omp_num_threads: int | None, local_rank: int, local_world_size: int
) -> int:
    """Sets how many threads compute on CPU, and on which cores; the number. Must run on the thread
    that computes, before it starts others: they stay on the same cores.

    The number is `--cpu-threads`, else OMP_NUM_THREADS, else the cores of this rank's share.
    """
    allowed = os.sched_getaffinity(0)
    share = core_share(allowed, _launcher_cores(allowed), local_rank, local_world_size)
    num_threads = cpu_threads or omp_num_threads or share.num_cores
    if share.cores and num_threads <= len(share.cores):
        os.sched_setaffinity(0, share.cores)  # 0: this thread
    torch.set_num_threads(num_threads)
    return num_threads


@dataclass(frozen=True, slots=True)
class CoreShare:
    """A rank's part of its node. `cores` is empty where the operating system is to place it."""

    num_cores: int
    cores: tuple[int, ...] = ()


def core_share(
    allowed: AbstractSet[int],
    launcher_cores: AbstractSet[int],
    local_rank: int,
    local_world_size: int,
) -> CoreShare:
    """What this rank may compute on, of the `allowed` cores, beside the node's other ranks.

    A launcher that is allowed more cores than the rank has bound its ranks (srun, mpirun): to a
    core, or several ranks to a socket; then they stay where they are. Otherwise ranks cut what they
    are all allowed into equal parts, siblings of a core and neighbours on a chip together. A part
    of one core is not enforced: the rank's event loop and other processes want some of it, and what
    is bound to it cannot step aside.
    """
    num_sharing = max(1, round(local_world_size * len(allowed) / len(launcher_cores)))
    num_cores = max(1, len(allowed) // num_sharing)
    if launcher_cores > allowed or num_cores == 1 or num_sharing == 1:
        return CoreShare(num_cores)
    ordered = sorted(allowed, key=_place_of_core)
    first = local_rank * num_cores
    return CoreShare(num_cores, tuple(ordered[first : first + num_cores]))


def _launcher_cores(own: AbstractSet[int]) -> AbstractSet[int]:
    """As `own` where it cannot be known; never less than that."""
    try:
        return os.sched_getaffinity(launched_by.PID) | own if launched_by.PID else own
    except OSError:
        return own


def _place_of_core(core: int) -> tuple[int, ...]:
    """Orders cores by package, then physical core."""
    topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package = int((topology / "physical_package_id").read_text())
        return package, int((topology / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """StartupError when the device cannot compute in this type; emulation does not count."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        name = torch.cuda.get_device_name(device)
        raise StartupError(f"{name} does not compute in bfloat16: use --dtype float16 or float32")
