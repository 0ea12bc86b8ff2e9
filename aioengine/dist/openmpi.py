"""A process that Open MPI's mpirun started, version 4 or 5. No MPI is needed or used.

Documented are only ranks and sizes (Open MPI: "Environment variables set for MPI applications").
The rest is what both versions really set: the namespace is unique to a run of mpirun, and names
its host in version 5 (`prterun-HOST-PID@1`), where version 4 gives its addresses
(`JOB;tcp://ADDRESS,…:PORT`). By default rank 0 runs on that host.
"""

import hashlib
import re
import socket
from typing import Final

from aioengine.dist.interface import LOOPBACK
from aioengine.dist.launcher_env import (
    Environment,
    LauncherEnv,
    read_index,
    read_number,
    read_port,
    rendezvous_port,
)

MPIRUN_SET: Final = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
MPIRUN_ALSO: Final = (
    "PMIX_NAMESPACE",
    "PMIX_HOSTNAME",
    "OMPI_MCA_orte_hnp_uri",
    "MASTER_ADDR",
    "MASTER_PORT",
)
DAEMON_MARKS: Final = ("PRTE_LAUNCHED", "OMPI_MCA_orte_launch")
"""Set by the daemons of mpirun, versions 5 and 4, and by nothing else."""
_NAMESPACE: Final = re.compile(r"prte(?:run)?-(?P<host>.+)-[0-9]+@[0-9]+")
_URI: Final = re.compile(r"[^;]*;tcp(?:://(?P<ipv4>[0-9.]+)|6://\[(?P<ipv6>[0-9a-fA-F:]+)).*")


def is_under_mpirun(environ: Environment) -> bool:
    return "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ


def owns_step(environ: Environment, num_step_tasks: int) -> bool:
    """Whether a srun step around this process is that of mpirun's own daemons.

    Under Slurm mpirun starts a daemon per further node by srun, and the ranks there inherit the
    daemon's step, which has fewer tasks than mpirun has ranks.
    """
    is_ours = any(name in environ for name in DAEMON_MARKS)
    return is_ours and num_step_tasks < read_number(environ, "OMPI_COMM_WORLD_SIZE")


def read_mpirun(environ: Environment) -> LauncherEnv:
    """The process of an environment that has the MPIRUN_SET.

    Raises ValueError that names the malformed variable, or the one that is needed in addition.
    """
    size = read_number(environ, "OMPI_COMM_WORLD_SIZE")
    local_size = read_number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    address, port, source = LOOPBACK, 0, ""
    if size > 1:
        address, address_source = _master_addr(environ, is_single_node=local_size == size)
        port, port_source = _master_port(environ)
        source = f"{address_source}, {port_source}"
    return LauncherEnv(
        kind="openmpi",
        rank=read_index(environ, "OMPI_COMM_WORLD_RANK", size, f"OMPI_COMM_WORLD_SIZE {size}"),
        world_size=size,
        local_rank=read_index(
            environ,
            "OMPI_COMM_WORLD_LOCAL_RANK",
            local_size,
            f"OMPI_COMM_WORLD_LOCAL_SIZE {local_size}",
        ),
        local_world_size=local_size,
        node=environ.get("PMIX_HOSTNAME", socket.gethostname()),
        master_addr=address,
        master_port=port,
        master_source=source,
        job=f"mpirun {environ.get('PMIX_NAMESPACE')}",
    )


def _master_addr(environ: Environment, is_single_node: bool) -> tuple[str, str]:
    """Where rank 0 should be, and who says so."""
    if "MASTER_ADDR" in environ:
        return environ["MASTER_ADDR"], "MASTER_ADDR"
    if is_single_node:
        return LOOPBACK, "one node"
    if match := _NAMESPACE.fullmatch(environ.get("PMIX_NAMESPACE", "")):
        return match["host"], "mpirun's host in PMIX_NAMESPACE"
    if match := _URI.fullmatch(environ.get("OMPI_MCA_orte_hnp_uri", "")):
        return match["ipv4"] or match["ipv6"], "mpirun's host in OMPI_MCA_orte_hnp_uri"
    raise ValueError(
        "Open MPI's variables do not say where rank 0 runs; give mpirun -x MASTER_ADDR=HOST "
        "with the host of rank 0"
    )


def _master_port(environ: Environment) -> tuple[int, str]:
    if (port := read_port(environ)) is not None:
        return port, "MASTER_PORT"
    if "PMIX_NAMESPACE" not in environ:
        raise ValueError(
            "Open MPI's variables do not tell this run of mpirun from others (no PMIX_NAMESPACE); "
            "give mpirun -x MASTER_PORT=PORT with a free port of rank 0's host"
        )
    digest = hashlib.sha256(environ["PMIX_NAMESPACE"].encode()).digest()
    return rendezvous_port(int.from_bytes(digest[:8])), "port by PMIX_NAMESPACE"
