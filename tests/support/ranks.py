"""A module on several ranks of this machine, started as torchrun starts ranks.

The test calls `run_ranks`; the module agrees on a store through the others.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore

HOST = "127.0.0.1"
TIMEOUT_S = 120
TESTS = Path(__file__).parents[1]


def run_ranks(module: str, num_ranks: int, *arguments: str) -> None:
    """Fails with the ranks' output unless all of them exit with 0. Leaves no process behind."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*torchrun, "--nproc-per-node", str(num_ranks), "-m", module, *arguments],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": f"{TESTS.parent}:{TESTS}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.terminate()  # torchrun ends its ranks before itself, which takes it up to 30 s
        process.wait()
    assert process.returncode == 0, output


def rank_of_this_process() -> int:
    return int(os.environ["RANK"])


def launch_store() -> TCPStore:
    """The store of torchrun, as a script of a user would reach it."""
    timeout = timedelta(seconds=TIMEOUT_S)
    return TCPStore(HOST, int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


def agree_on_port(open_port: Callable[[], int], key: str = "port", opener: int = 0) -> int:
    """The port that `open_port` gives on rank `opener`, on every rank; a `key` serves once."""
    launch = launch_store()
    if rank_of_this_process() == opener:
        launch.set(key, str(open_port()))
    return int(launch.get(key))
