"""A task of a Slurm job step, as srun starts it.

What the variables mean: srun(1), "Output environment variables". SLURM_NTASKS is the step's number
of tasks unless `--preserve-env` made it the job's; SLURM_STEP_NUM_TASKS always is the step's. The
shells of sbatch and salloc have similar variables, but no step or a special one.
"""

from typing import Final

from aioengine.dist.hostlist import HostList, parse_hosts, parse_task_counts
from aioengine.dist.interface import LOOPBACK
from aioengine.dist.launcher_env import (
    Environment,
    LauncherEnv,
    read_index,
    read_number,
    read_port,
    rendezvous_port,
)

STEP_SET: Final = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST")
STEP_ALSO: Final = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_NODEID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
)
SPECIAL_STEP_IDS: Final = frozenset(map(str, range(0xFFFFFFF0, 2**32)))
"""Not steps of the user's: 0xFFFFFFFA, for one, is the shell of salloc (slurm.h)."""
PORTS_PER_JOB: Final = 101
"""From the port of one job to that of the next; step ids are added."""


def is_in_step(environ: Environment) -> bool:
    """Whether this process belongs to a step of the user's, complete or not."""
    if "SLURM_STEP_ID" in environ:
        return environ["SLURM_STEP_ID"] not in SPECIAL_STEP_IDS
    return "SLURM_STEP_NODELIST" in environ


def num_step_tasks(environ: Environment) -> int:
    """Of an environment that has the STEP_SET."""
    name = _num_tasks_variable(environ)
    if (num_tasks := read_number(environ, name)) < 1:
        raise ValueError(f"{name} must be at least 1, found {num_tasks}")
    return num_tasks


def _num_tasks_variable(environ: Environment) -> str:
    return "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"


def read_step(environ: Environment) -> LauncherEnv:
    """The task of an environment that has the STEP_SET.

    Raises ValueError that names the malformed or contradictory variable.
    """
    num_tasks = num_step_tasks(environ)
    rank = read_index(environ, "SLURM_PROCID", num_tasks, f"the {num_tasks} tasks of the step")
    try:
        hosts = parse_hosts(environ["SLURM_STEP_NODELIST"])
    except ValueError as error:
        raise ValueError(f"SLURM_STEP_NODELIST: {error}") from None
    node = 0
    if len(hosts) > 1:
        listed = f"the {len(hosts)} hosts of SLURM_STEP_NODELIST"
        node = read_index(environ, "SLURM_NODEID", len(hosts), listed)
    num_here = _num_tasks_on(environ, node, num_tasks, hosts)
    here = f"the {num_here} tasks of node {node} by SLURM_STEP_TASKS_PER_NODE"
    master_addr, master_port, source = _rendezvous(environ, num_tasks, hosts)
    return LauncherEnv(
        kind="srun",
        rank=rank,
        world_size=num_tasks,
        local_rank=read_index(environ, "SLURM_LOCALID", num_here, here),
        local_world_size=num_here,
        node=str(node),
        master_addr=master_addr,
        master_port=master_port,
        master_source=source,
        job=f"slurm {environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}",
    )


def _num_tasks_on(environ: Environment, node: int, num_tasks: int, hosts: HostList) -> int:
    """Tasks of the step on one of its nodes; without the variable, as an even spread has it."""
    if "SLURM_STEP_TASKS_PER_NODE" not in environ:
        return -(-num_tasks // len(hosts))
    try:
        counts = parse_task_counts(environ["SLURM_STEP_TASKS_PER_NODE"])
    except ValueError as error:
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE: {error}") from None
    if (counts.num_tasks, counts.num_nodes) != (num_tasks, len(hosts)):
        raise ValueError(
            f"SLURM_STEP_TASKS_PER_NODE {environ['SLURM_STEP_TASKS_PER_NODE']} tells of "
            f"{counts.num_tasks} tasks on {counts.num_nodes} nodes, but the step has {num_tasks} "
            f"({_num_tasks_variable(environ)}) on {len(hosts)} "
            f"({environ['SLURM_STEP_NODELIST']} in SLURM_STEP_NODELIST)"
        )
    return counts.on_node(node)


def _rendezvous(environ: Environment, num_tasks: int, hosts: HostList) -> tuple[str, int, str]:
    """Address, port and where they come from. Raises ValueError when nothing says the port."""
    if (address := environ.get("MASTER_ADDR")) is not None:
        source = "MASTER_ADDR"
    elif len(hosts) == 1:
        address, source = LOOPBACK, "one node"
    else:
        address, source = hosts.first, "the first host of SLURM_STEP_NODELIST"
    if (port := read_port(environ)) is not None:
        return address, port, f"{source}, MASTER_PORT"
    if num_tasks == 1:
        return address, 0, source
    if "SLURM_JOB_ID" not in environ:
        raise ValueError(
            "nothing says at which port the tasks of this srun step meet: neither SLURM_JOB_ID "
            "nor MASTER_PORT is set"
        )
    step_id = read_number(environ, "SLURM_STEP_ID", default=0)
    number = PORTS_PER_JOB * read_number(environ, "SLURM_JOB_ID") + step_id
    return address, rendezvous_port(number), f"{source}, port by SLURM_JOB_ID and SLURM_STEP_ID"


def read_job_end(environ: Environment) -> float | None:
    """When the walltime of this process's job is over, in unix seconds.

    As far as it was known when Slurm started the process: the limit may have been moved since.
    """
    return float(read_number(environ, "SLURM_JOB_END_TIME", default=0)) or None


def refuse_shell(environ: Environment) -> None:
    """ValueError in a shell of sbatch or salloc that was given more than one task."""
    if (num_tasks := read_number(environ, "SLURM_NTASKS", default=1)) > 1:
        raise ValueError(
            f"SLURM_NTASKS is {num_tasks} but this is no srun step: a batch shell starts one "
            "process only; put srun before this command, or let srun start one torchrun per node"
        )
