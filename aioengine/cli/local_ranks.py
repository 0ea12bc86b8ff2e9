"""Ranks of this machine, started as torchrun starts them, without torchrun's own process."""

import logging
import os
import select
import signal
import sys
import tempfile
import threading
import uuid
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


def run_ranks(
    prog: str,
    rank_argv: list[str],
    num_ranks: int,
    shutdown_timeout_s: int,
    *,
    max_restarts: int = 0,
    names_first: bool = True,
    drains: bool = False,
) -> int:
    """Runs torchrun's elastic agent in this process until all ranks have ended.

    It starts all of them again up to `max_restarts` times after one failed. Returns the exit
    status; `prog` says on stderr which rank failed first, unless the ranks agree on a status and
    say why themselves. On a signal ranks get `shutdown_timeout_s` to end before they are killed;
    the status is then 0 if being asked to end is their way to end (`drains`), and 128 + the
    signal's number otherwise.
    """
    # The ranks' own log says what happened, and which of them was first.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="aioengine-") as log_dir:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="127.0.0.1",
            max_restarts=max_restarts,
            logs_specs=DefaultLogsSpecs(log_dir=log_dir),
            shutdown_timeout=shutdown_timeout_s,
        )
        try:
            elastic_launch(config, rank_argv[0])(*rank_argv[1:])
        except ChildFailedError as failed:
            rank, failure = failed.get_first_failure()
            if names_first:
                print(
                    f"{prog}: rank {rank} (pid {failure.pid}) ended first, with status "
                    f"{failure.exitcode}; its log lines say why",
                    file=sys.stderr,
                )
            return 1
        except SignalException as stopped:
            if not drains:
                print(f"{prog}: {stopped.sigval.name}", file=sys.stderr)
                return 128 + stopped.sigval
            asked = stopped.sigval in (signal.SIGTERM, signal.SIGINT)
            any_failed = any(Path(log_dir).rglob("error.json"))
            return 0 if asked and not any_failed else 1
    return 0


def end_with_parent() -> None:
    """From now on this process ends when the one that started it is gone, whatever it is in."""
    parent = os.pidfd_open(os.getppid())

    def wait() -> None:
        select.select([parent], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="parent watch", daemon=True).start()
