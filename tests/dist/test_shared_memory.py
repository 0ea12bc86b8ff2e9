"""Shared-memory collectives, on real ranks."""

import os
import signal
import sys
import time

from support.launching import Launch
from support.ranks import TESTS, run_ranks

RAISED_S = 1.0


def test_sums_are_exact_and_equal_on_all_ranks() -> None:
    run_ranks("support.shared_memory_ranks", 8)


def test_faults_are_named_and_a_killed_rank_is_seen_at_once() -> None:
    files_before = set(os.listdir("/dev/shm"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, "--nproc-per-node", "4", "-m", "support.shared_memory_faults"]
    environment = {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": f"{TESTS.parent}:{TESTS}"}
    with Launch(command=command, env=environment) as launch:
        pids = [
            int(launch.wait_line(rf"place {place} pid (\d+) reduces")[1]) for place in range(4)
        ]
        os.kill(pids[1], signal.SIGKILL)
        killed = time.monotonic()
        for place in (0, 2, 3):
            line = launch.wait_line(rf"place {place} lost: (.*)")[1]
            assert line.startswith("rank 11 died while rank 1"), line
            assert "all_reduce of 4194304 B float32 at job 0 of group 'tp:0'" in line
        assert time.monotonic() - killed < RAISED_S
        assert launch.wait_end() == 1
        assert launch.pids_left() == []
    assert set(os.listdir("/dev/shm")) <= files_before
