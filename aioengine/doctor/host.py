"""What a rank can say about itself and its host without meeting anybody."""

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from aioengine.dist.interface import interface_of
from aioengine.doctor.messages import Facts
from aioengine.handshake_messages import Endpoint
from aioengine.rank.place import Place
from aioengine.worker.memory import free_cpu_bytes

SHM: Final = Path("/dev/shm")
VARIABLE_PREFIXES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "FI_",
    "GLOO_",
    "GOMP_",
    "KMP_",
    "MKL_NUM_THREADS",
    "NCCL_",
    "OMP_",
    "TORCH_NCCL_",
    "TP_SOCKET_",
    "UCX_",
)
"""Of environment variables that steer the network, threads and devices of torch's libraries."""


def gather_facts(
    place: Place, environ: Mapping[str, str], probe: Endpoint | None, listen_error: str
) -> Facts:
    """Takes milliseconds, unless a name server is slow. `environ` as the launcher made it."""
    env, info = place.env, place.info
    interface = interface_of(place.address)
    shm_free, shm_total, shm_error = _shared_memory()
    open_files, open_files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Facts(
        rank=info.rank,
        world_size=env.world_size,
        local_rank=env.local_rank,
        local_world_size=env.local_world_size,
        coords=info.coords,
        node=env.node,
        host=info.host,
        machine=_first_line(Path("/proc/sys/kernel/random/boot_id")),
        network=str(os.stat("/proc/self/ns/net").st_ino),
        pid=info.pid,
        address=place.address,
        interface=interface,
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        mtu=_mtu(interface) if interface is not None else None,
        probe=probe,
        listen_error=listen_error,
        host_resolves_to=resolve(info.host),
        rendezvous=env.master_addr,
        rendezvous_resolves_to=resolve(env.master_addr),
        launcher=env.kind,
        launcher_variables=env.echo,
        variables={
            name: value
            for name, value in sorted(environ.items())
            if name.startswith(VARIABLE_PREFIXES)
        },
        aioengine=version("aioengine"),
        torch=version("torch"),
        python=platform.python_version(),
        memory_free=free_cpu_bytes(),
        memory_total=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        shm_free=shm_free,
        shm_total=shm_total,
        shm_error=shm_error,
        open_files=_unlimited_as_max(open_files),
        open_files_hard=_unlimited_as_max(open_files_hard),
        locked_memory=None if locked == resource.RLIM_INFINITY else locked,
        infiniband=tuple(sorted(_names_in(Path("/sys/class/infiniband")))),
        cores=tuple(sorted(os.sched_getaffinity(0))),
        machine_cores=os.cpu_count() or 1,
    )


def resolve(name: str) -> tuple[str, ...]:
    """IPv4 addresses of a host name, as this host finds them; empty when it finds none."""
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(sorted({str(address[0]) for *_, address in found}))


def _mtu(interface: str) -> int | None:
    text = _first_line(Path("/sys/class/net") / interface / "mtu")
    return int(text) if text.isdigit() else None


def _shared_memory() -> tuple[int, int, str]:
    """Free and total bytes of /dev/shm, and why no memory can be shared there."""
    try:
        usage = shutil.disk_usage(SHM)
        with tempfile.TemporaryFile(dir=SHM) as file:
            os.posix_fallocate(file.fileno(), 0, resource.getpagesize())
    except OSError as error:
        return 0, 0, f"{SHM}: {error.strerror}"
    return usage.free, usage.total, ""


def _unlimited_as_max(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _names_in(directory: Path) -> list[str]:
    return [entry.name for entry in directory.iterdir()] if directory.is_dir() else []


def _first_line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
