"""Enough of a Slurm cluster to run a batch script: `srun` and `scontrol` for its PATH.

As a program it is one of the two: `python fake_slurm.py srun OPTION... COMMAND...` starts the tasks
of a step side by side with the variables that srun sets, each with a log of its own by --output,
which is also shown (for tests to wait on; srun does not). Signals go on to every task. One that
ends does not end the others; the status is the highest of theirs, 128 + number for a signal.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import IO

CALLS = "FAKE_SLURM_CALLS"
"""Names the file that keeps the arguments of scontrol."""


class FakeSlurm:
    """One job with `num_tasks` tasks on this host, submitted from `directory`."""

    def __init__(self, directory: Path, num_tasks: int, end_time: int) -> None:
        self._calls = directory / "scontrol-calls"
        self.job_id = str(os.getpid())
        self.job_dir = directory / f"aioengine-{self.job_id}"
        programs = directory / "programs"
        programs.mkdir()
        for name in ("srun", "scontrol"):
            line = shlex.join([sys.executable, __file__, name])
            (programs / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            CALLS: str(self._calls),
            "SLURM_JOB_ID": self.job_id,
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_JOB_END_TIME": str(end_time),
            "SLURM_SUBMIT_DIR": str(directory),
            "SLURM_NTASKS": str(num_tasks),
            "SLURM_CPUS_PER_TASK": "1",
        }

    def scontrol_calls(self) -> list[str]:
        """The arguments of each."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []


def scontrol(arguments: list[str]) -> int:
    with open(os.environ[CALLS], "a") as calls:
        calls.write(shlex.join(arguments) + "\n")
    return 0


def srun(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser("srun", allow_abbrev=False)
    parser.add_argument("--output", required=True)
    for option in ("kill-on-bad-exit", "wait", "distribution", "cpus-per-task", "gpu-bind"):
        parser.add_argument(f"--{option}")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    tasks = [
        subprocess.Popen(
            options.command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_task_variables(rank)},
        )
        for rank in range(int(os.environ["SLURM_NTASKS"]))
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    copies = []
    for rank, task in enumerate(tasks):
        assert task.stdout is not None
        log = Path(options.output.replace("%t", str(rank)))
        copies.append(threading.Thread(target=_copy, args=(task.stdout, log)))
        copies[-1].start()
    statuses = [task.wait() for task in tasks]
    for copy in copies:
        copy.join()
    return max(status if status >= 0 else 128 - status for status in statuses)


def _task_variables(rank: int) -> dict[str, str]:
    num_tasks = os.environ["SLURM_NTASKS"]
    return {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
        "SLURM_STEP_NUM_TASKS": num_tasks,
        "SLURM_STEP_TASKS_PER_NODE": num_tasks,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
    }


def _copy(output: IO[bytes], log: Path) -> None:
    with log.open("wb", buffering=0) as file:
        for line in output:
            file.write(line)
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    sys.exit({"srun": srun, "scontrol": scontrol}[name](rest))
