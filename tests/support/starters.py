"""Commands for `Launch` that start ranks in other ways than one torchrun."""

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from support.launching import rank_command
from support.two_nodes import Node

SIDE_BY_SIDE = Path(__file__).with_name("side_by_side.py")
_step_ids = itertools.count()


def side_by_side(tasks: Sequence[tuple[list[str], dict[str, str]]]) -> list[str]:
    """Command lines and environments, all at once; see side_by_side.py."""
    return [sys.executable, str(SIDE_BY_SIDE), json.dumps(tasks)]


def srun(num_tasks: int, nodes: Sequence[Node] = (), *, job_end: int | None = None) -> list[str]:
    """A step of its own, with the variables that srun sets, evenly over the nodes in order."""
    per_node = num_tasks // max(1, len(nodes))
    step = {
        "SLURM_NTASKS": str(num_tasks),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": str(next(_step_ids)),
        "SLURM_STEP_NODELIST": f"node[1-{len(nodes)}]" if nodes else "node1",
        "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{len(nodes)})" if nodes else str(num_tasks),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
    }
    if job_end is not None:
        step["SLURM_JOB_END_TIME"] = str(job_end)
    tasks = []
    for rank in range(num_tasks):
        node, local_rank = divmod(rank, per_node)
        task = {
            **step,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NODEID": str(node),
        }
        tasks.append(([*(nodes[node].prefix if nodes else []), *rank_command(1)], task))
    return side_by_side(tasks)


def torchrun_agents(
    options: Sequence[Sequence[str]], *, per_node: int, nodes: Sequence[Node] = ()
) -> list[str]:
    """One torchrun for each node with the options that it gets."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(options))]
    ranks = ["--nproc-per-node", str(per_node)]
    return side_by_side(
        [
            (
                [
                    *(nodes[i].prefix if nodes else []),
                    *torchrun,
                    *ranks,
                    *own,
                    *rank_command(1)[1:],
                ],
                {},
            )
            for i, own in enumerate(options)
        ]
    )
