"""Why a control connection closed, as far as this host can know.

A process learns the exit status of its children only. But the kernel shows that of any process of
the same user from its end until its parent has asked for it, which takes torchrun 0.1 s.
"""

import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aioengine.messages import RankInfo

EXPLAIN_S: Final = 0.05
"""A process that dies closes its connections just before the kernel says that it is dead."""


def explain_loss(info: RankInfo, reason: str, tell: Callable[[str], None]) -> None:
    """Call `tell` once with `reason` and what else is known: at once, or, for a process of this
    host, when it has ended, but at most EXPLAIN_S later."""
    if info.host != socket.gethostname():
        tell(f"{reason} (killed, crashed or unreachable)")
        return
    try:
        pidfd = os.pidfd_open(info.pid)
    except OSError:
        tell(f"{reason} (its process is gone)")
        return
    loop = asyncio.get_running_loop()

    def conclude(what: str) -> None:
        loop.remove_reader(pidfd)
        os.close(pidfd)
        limit.cancel()
        tell(f"{reason} ({what})")

    limit = loop.call_later(EXPLAIN_S, conclude, "but its process lives")
    loop.add_reader(pidfd, lambda: conclude(describe_end(info.pid)))


def describe_end(pid: int) -> str:
    """How a process ended: exactly, until its parent has asked for that (proc_pid_stat(5))."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "its process is gone"
    status = int(fields[49])  # field 52, counted behind the name; 0 also where it is not shown
    if fields[0] != "Z" or status == 0:
        return "its process has ended"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        return f"its process was killed by signal {number}, {signal.Signals(number).name}"
    return f"its process exited with status {os.WEXITSTATUS(status)}"
