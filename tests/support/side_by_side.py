"""`python side_by_side.py TASKS ARGUMENT...`: start all tasks at once, as srun does, and stay.

TASKS is a JSON list of [command line, environment]; each command gets the arguments appended. All
share this process's output. Signals go on to each; one that ends does not end the others, as with
srun without --kill-on-bad-exit. A line says with which status each has ended, 128 + number for a
signal; the highest is this process's status.
"""

import json
import os
import signal
import subprocess
import sys
from types import FrameType


def main() -> int:
    tasks = {
        subprocess.Popen([*command, *sys.argv[2:]], env={**os.environ, **environment}).pid: number
        for number, (command, environment) in enumerate(json.loads(sys.argv[1]))
    }

    def pass_on(number: int, frame: FrameType | None) -> None:
        for pid in tasks:
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    highest = 0
    while tasks:
        pid, wait_status = os.wait()
        code = os.waitstatus_to_exitcode(wait_status)
        status = code if code >= 0 else 128 - code
        print(f"task {tasks.pop(pid)} ended with status {status}", flush=True)
        highest = max(highest, status)
    return highest


if __name__ == "__main__":
    sys.exit(main())
