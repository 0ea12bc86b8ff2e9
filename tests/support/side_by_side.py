"""`python side_by_side.py TASKS ARGUMENT...`: start all tasks at once, as srun does, and stay.

TASKS is a JSON list of [command line, environment]; each command gets the arguments appended. All
share this process's output. Signals go on to each; one that ends does not end the others, as with
srun without --kill-on-bad-exit. The status is the highest of theirs, 128 + number for a signal.
"""

import json
import os
import signal
import subprocess
import sys
from types import FrameType


def main() -> int:
    tasks = [
        subprocess.Popen([*command, *sys.argv[2:]], env={**os.environ, **environment})
        for command, environment in json.loads(sys.argv[1])
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    statuses = [task.wait() for task in tasks]
    return max(status if status >= 0 else 128 - status for status in statuses)


if __name__ == "__main__":
    sys.exit(main())
