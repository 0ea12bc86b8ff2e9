"""Where this process stands, according to whoever started it.

The only reader of environment variables beside `launch.py`. A launcher is recognised by its set of
variables, and the first complete set wins: torchrun, a srun step, Open MPI, none. MASTER_ADDR and
MASTER_PORT alone mean nothing. Under srun and Open MPI they are hints: rank 0 opens the rendezvous
there, and without them at a place that all ranks derive alike.
"""

import ipaddress
import json
import logging
import os
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from aioengine.dist.interface import (
    LOOPBACK,
    address_towards,
    describe_interfaces,
    interface_of,
    is_this_host,
)
from aioengine.dist.launcher_env import (
    Environment,
    LauncherEnv,
    read_index,
    read_number,
    read_port,
)
from aioengine.dist.openmpi import (
    MPIRUN_ALSO,
    MPIRUN_SET,
    is_under_mpirun,
    owns_step,
    read_mpirun,
)
from aioengine.dist.slurm import (
    STEP_ALSO,
    STEP_SET,
    is_in_step,
    num_step_tasks,
    read_job_end,
    read_step,
    refuse_shell,
)

log = logging.getLogger(__name__)

TORCHRUN_SET: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN_ALSO: Final = ("LOCAL_WORLD_SIZE", "GROUP_RANK")


@dataclass(frozen=True, slots=True)
class Launcher:
    """One way to start ranks, the variables that each of them gets, and their reader."""

    name: str
    needed: tuple[str, ...]
    optional: tuple[str, ...]
    is_present: Callable[[Environment], bool]
    """Whether it seems to have started this process, with the whole set or not."""
    read: Callable[[Environment], LauncherEnv]

    def missing(self, environ: Environment) -> list[str]:
        return [name for name in self.needed if name not in environ]

    def refuse(self, environ: Environment) -> None:
        """ValueError for a set that is not complete."""
        found = [name for name in (*self.needed, *self.optional) if name in environ]
        raise ValueError(
            f"incomplete {self.name} environment: found {', '.join(found)} but not "
            f"{', '.join(self.missing(environ))}; start with {self.name}, or without any of them "
            "for one rank"
        )


def read_environment(environ: Environment) -> LauncherEnv:
    """The launcher's variables; first complete set wins.

    Raises ValueError that names the missing or malformed variables.
    """
    launchers = _find_launchers(environ)
    if launchers:
        env = launchers[0].read(environ)
        echo = _describe(environ, (*launchers[0].needed, *launchers[0].optional))
    else:
        refuse_shell(environ)
        env, echo = LauncherEnv(kind="none"), ""
    if env.world_size > 1 and env.kind != "torchrun":
        echo += f"; rendezvous {env.master_addr}:{env.master_port} ({env.master_source})"
    for lower in launchers[1:]:
        echo += f"; ignored {lower.name}: {_describe(environ, lower.needed)}"
    secret = environ.get("AIOENGINE_JOB_SECRET")
    omp = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    return replace(
        env,
        job_end=read_job_end(environ),
        job_secret=secret.encode() if secret else None,
        host_ip=environ.get("AIOENGINE_HOST_IP") or None,
        omp_num_threads=int(omp) if omp.isdecimal() else None,
        echo=echo,
    )


def _describe(environ: Environment, names: Iterable[str]) -> str:
    """Those that are set, as a person types them."""
    return " ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _find_launchers(environ: Environment) -> list[Launcher]:
    """Those with a complete set, the one that counts first.

    Raises ValueError for an incomplete set above the first complete one.
    """
    complete: list[Launcher] = []
    for launcher in (TORCHRUN, SRUN, OPENMPI):
        if not launcher.is_present(environ):
            continue
        if not launcher.missing(environ):
            complete.append(launcher)
        elif not complete:
            launcher.refuse(environ)
    if not complete and "WORLD_SIZE" in environ:  # scripts export it for what srun starts
        TORCHRUN.refuse(environ)
    if complete == [SRUN, OPENMPI] and owns_step(environ, num_step_tasks(environ)):
        complete.reverse()
    return complete


def _is_under_torchrun(environ: Environment) -> bool:
    return "RANK" in environ or "LOCAL_RANK" in environ


def _read_torchrun(environ: Environment) -> LauncherEnv:
    world_size = read_number(environ, "WORLD_SIZE")
    if "LOCAL_WORLD_SIZE" in environ:
        local_size = read_number(environ, "LOCAL_WORLD_SIZE")
        read_index(environ, "LOCAL_RANK", local_size, f"LOCAL_WORLD_SIZE {local_size}")
    port = read_port(environ)
    assert port is not None
    return LauncherEnv(
        kind="torchrun",
        rank=read_index(environ, "RANK", world_size, f"WORLD_SIZE {world_size}"),
        world_size=world_size,
        local_rank=read_number(environ, "LOCAL_RANK"),
        local_world_size=read_number(environ, "LOCAL_WORLD_SIZE", default=1),
        node=environ.get("GROUP_RANK", "0"),
        master_addr=environ["MASTER_ADDR"],
        master_port=port,
        agent_hosts_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        restart_count=read_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        error_file=environ.get("TORCHELASTIC_ERROR_FILE"),
    )


TORCHRUN: Final = Launcher(
    "torchrun", TORCHRUN_SET, TORCHRUN_ALSO, _is_under_torchrun, _read_torchrun
)
SRUN: Final = Launcher("srun", STEP_SET, STEP_ALSO, is_in_step, read_step)
OPENMPI: Final = Launcher("mpirun", MPIRUN_SET, MPIRUN_ALSO, is_under_mpirun, read_mpirun)


def own_address(env: LauncherEnv, override: str | None) -> str:
    """This process's address for the other ranks: that of the interface which routes to the
    rendezvous host; loopback when all ranks are on one node.

    Raises ValueError when `override` (`--host-ip`) is not this host's, when the rendezvous host
    does not resolve or has no route, or is not this host although rank 0 is here.
    """
    if env.hosts_store and env.kind != "torchrun" and not is_this_host(env.master_addr):
        raise ValueError(
            f"rank 0 must open the rendezvous at {env.master_addr} ({env.master_source}), which is "
            f"not this host, {socket.gethostname()}; set MASTER_ADDR to this host on all ranks"
        )
    if wanted := override or env.host_ip:
        _check_is_here("--host-ip" if override else "AIOENGINE_HOST_IP", wanted)
        return wanted
    if env.is_single_node:
        return LOOPBACK
    return address_towards(env.master_addr)


def _check_is_here(source: str, address: str) -> None:
    """ValueError unless an interface carries the address: ranks listen on it."""
    try:
        is_here = ipaddress.ip_address(address).is_loopback or interface_of(address) is not None
    except ValueError:
        raise ValueError(f"{source} must be an IP address, found {address!r}") from None
    if not is_here:
        raise ValueError(
            f"{source} {address}: no interface of this host has this address; it has "
            f"{describe_interfaces()}"
        )


def choose_interface(address: str) -> None:
    """Point gloo and NCCL at the interface of `address`, unless the user pointed them already."""
    name = interface_of(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if address != LOOPBACK:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    log.info("address for other ranks: %s on interface %s", address, name)


def report_to_launcher(env: LauncherEnv, message: str) -> None:
    """Leave the reason of a failure where torchelastic looks for it."""
    if env.error_file is not None:
        entry = {"message": {"message": message, "extraInfo": {"timestamp": int(time.time())}}}
        Path(env.error_file).write_text(json.dumps(entry))
