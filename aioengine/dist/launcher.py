"""Where this process stands, according to whoever started it.

The only reader of environment variables beside `launch.py`. A launcher is recognised by its
complete set of variables; MASTER_ADDR and MASTER_PORT alone mean nothing.
"""

import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final, Literal

from torch.distributed import PrefixStore, Store, TCPStore

from aioengine.errors import StartupTimeoutError

LOOPBACK: Final = "127.0.0.1"
TORCHRUN_SET: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
MAX_PORT: Final = 65535
SIOCGIFADDR: Final = 0x8915
"""ioctl(2) that reads the IPv4 address of a network interface (Linux, netdevice(7))."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnv:
    """One process of a launch. `node` names the launcher's node, not the host."""

    kind: Literal["torchrun", "none"]
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: str = "0"
    master_addr: str = LOOPBACK
    master_port: int = 0
    agent_hosts_store: bool = False
    restart_count: int = 0
    error_file: str | None = None
    """Where torchelastic looks for the reason of a failure."""
    job_secret: bytes | None = None
    host_ip: str | None = None
    omp_num_threads: int | None = None
    echo: str = ""
    """The launcher variables that were used, for the log."""

    @property
    def is_single_node(self) -> bool:
        return self.local_world_size == self.world_size


def read_environment(environ: Mapping[str, str]) -> LauncherEnv:
    """The launcher's variables; first complete set wins.

    Raises ValueError that names the missing or malformed variables.
    """
    secret = environ.get("AIOENGINE_JOB_SECRET")
    omp = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    job_secret = secret.encode() if secret else None
    host_ip = environ.get("AIOENGINE_HOST_IP") or None
    omp_num_threads = int(omp) if omp.isdigit() else None
    present = [name for name in TORCHRUN_SET if name in environ]
    if "RANK" not in environ and "LOCAL_RANK" not in environ:
        _refuse_slurm(environ)
        return LauncherEnv(
            kind="none", job_secret=job_secret, host_ip=host_ip, omp_num_threads=omp_num_threads
        )
    if len(present) < len(TORCHRUN_SET):
        missing = ", ".join(name for name in TORCHRUN_SET if name not in environ)
        raise ValueError(
            f"incomplete torchrun environment: found {', '.join(present)} but not {missing}; "
            "start with torchrun, or without any of them for one rank"
        )
    if (port := _number(environ, "MASTER_PORT")) > MAX_PORT:
        raise ValueError(f"MASTER_PORT must be at most {MAX_PORT}, found {port}")
    rank, world_size = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if not rank < world_size:
        raise ValueError(f"RANK {rank} does not fit WORLD_SIZE {world_size}")
    return LauncherEnv(
        kind="torchrun",
        rank=rank,
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_world_size=_number(environ, "LOCAL_WORLD_SIZE", default=1),
        node=environ.get("GROUP_RANK", "0"),
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        error_file=environ.get("TORCHELASTIC_ERROR_FILE"),
        job_secret=job_secret,
        host_ip=host_ip,
        omp_num_threads=omp_num_threads,
        echo=" ".join(f"{name}={environ[name]}" for name in TORCHRUN_SET),
    )


def _refuse_slurm(environ: Mapping[str, str]) -> None:
    num_tasks = environ.get("SLURM_NTASKS", "1")
    if not num_tasks.isdigit() or int(num_tasks) < 2:
        return
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        raise ValueError(
            f"this is a srun step of {num_tasks} tasks, and ranks started by srun itself do not "
            "run yet; use srun to start one torchrun per node"
        )
    raise ValueError(
        f"SLURM_NTASKS is {num_tasks} but this is no srun step: a batch shell starts one process "
        "only; use srun to start one torchrun per node"
    )


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdigit():
        raise ValueError(f"{name} must be a number, found {text!r}")
    return int(text)


def open_launcher_store(env: LauncherEnv, timeout_s: float) -> Store:
    """The store that all ranks of this launch can reach. Blocks until it answers.

    It may hold keys of an earlier attempt (`--max-restarts` keeps the port): see
    `control/bootstrap.py`.
    """
    try:
        store = TCPStore(
            env.master_addr,
            env.master_port,
            is_master=env.rank == 0 and not env.agent_hosts_store,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as error:  # torch's DistErrors are RuntimeErrors
        raise StartupTimeoutError(
            f"rank {env.rank} does not reach the launcher's store at {env.master_addr}:"
            f"{env.master_port} within --startup-timeout-seconds {timeout_s:g}; rank 0 or its "
            f"launcher is not there ({error})"
        ) from None
    return PrefixStore("aioengine", store)


def own_address(env: LauncherEnv, override: str | None) -> str:
    """This process's address for the other ranks: the interface that routes to the rendezvous
    host; loopback when all ranks are on one node."""
    if override or env.host_ip:
        return override or env.host_ip or ""
    if env.is_single_node:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((env.master_addr, env.master_port))  # UDP: a route, nothing is sent
        except OSError as error:
            raise ValueError(
                f"no route to the rendezvous host MASTER_ADDR {env.master_addr}: {error}"
            ) from None
        address: str = probe.getsockname()[0]
    return address


def interface_of(address: str) -> str | None:
    """Name of the network interface that carries an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None


def choose_interface(address: str) -> None:
    """Point gloo and NCCL at the interface of `address`, unless the user pointed them already."""
    if (name := interface_of(address)) is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if address != LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def report_to_launcher(env: LauncherEnv, message: str) -> None:
    """Leave the reason of a failure where torchelastic looks for it."""
    if env.error_file is not None:
        entry = {"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}
        Path(env.error_file).write_text(json.dumps(entry))
