"""Run by test_shared_memory.py on 4 ranks: everything that must not work, and at last a kill -9.

The group speaks of its members as ranks 10 to 13, so that places and ranks cannot be mixed up.
"""

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from support.ranks import rank_of_this_process

from aioengine.dist.shared_memory import SharedMemoryBackend, open_shared_memory
from aioengine.errors import DivergenceError, EngineError, RankLostError, StepTimeoutError

RANKS = (10, 11, 12, 13)
PLACE = rank_of_this_process()
NAME = "tp:0"


def try_to_open(node: str = "node", timeout_s: float = 60.0) -> SharedMemoryBackend | str:
    group = dist.group.WORLD
    assert group is not None
    rank = RANKS[PLACE]
    return open_shared_memory(
        group,
        group=NAME,
        ranks=RANKS,
        rank=rank,
        node=node,
        num_local_ranks=len(RANKS),
        timeout_s=timeout_s,
    )


@contextmanager
def opened(timeout_s: float = 60.0) -> Iterator[SharedMemoryBackend]:
    """A backend that all ranks close at the end, and only then."""
    backend = try_to_open(timeout_s=timeout_s)
    assert isinstance(backend, SharedMemoryBackend), backend
    yield backend
    dist.barrier()
    backend.close()


def check_refusal(found: SharedMemoryBackend | str, *parts: str) -> None:
    """All ranks must have the same sentence, with these parts."""
    assert isinstance(found, str), "memory is shared"
    for part in parts:
        assert part in found, found
    text = torch.frombuffer(bytearray(found.encode().ljust(1000)), dtype=torch.uint8)
    others = text.clone()
    dist.broadcast(others, 0)
    assert torch.equal(text, others), found


@contextmanager
def limited(kind: int, soft_limit: int) -> Iterator[None]:
    old = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft_limit, old[1]))
    yield
    resource.setrlimit(kind, old)


def check_refusals() -> None:
    num_files = len(os.listdir("/proc/self/fd"))
    check_refusal(try_to_open(node=f"n{PLACE // 2}"), "rank 10 is on node n0", "12 on node n1")
    if PLACE == 2:
        sys.modules["numba"] = None  # type: ignore[assignment] # as if it were not installed
    check_refusal(try_to_open(), "rank 12: ", "numba")
    if PLACE == 2:
        del sys.modules["numba"]
    limit = 1 << 20 if PLACE == 0 else resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    with limited(resource.RLIMIT_FSIZE, limit):
        check_refusal(try_to_open(), "rank 10: cannot reserve")
    limit = num_files if PLACE == 3 else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with limited(resource.RLIMIT_NOFILE, limit):
        check_refusal(try_to_open(), "rank 13: ", "Too many open files")
    assert len(os.listdir("/proc/self/fd")) == num_files, "a refusal leaves files open"


def check_that_waiting_leaves_the_interpreter_free() -> None:
    """Rank 0 waits in a thread for ranks that only its main thread can wake."""
    with opened() as backend:
        if PLACE == 0:
            waiting = threading.Thread(target=backend.all_reduce, args=(torch.ones(1),))
            waiting.start()
            dist.barrier()
            waiting.join()
        else:
            dist.barrier()
            backend.all_reduce(torch.ones(1))


def check_divergence() -> None:
    with opened() as backend:
        backend.enter_job(17 if PLACE == 1 else 16)
        backend.all_reduce(torch.ones(0))  # nothing to do, so nothing is compared
        other, one = torch.ones(2, 1024, dtype=torch.bfloat16), torch.ones(256)
        with pytest.raises(DivergenceError) as caught:
            backend.all_gather(other, 1) if PLACE == 1 else backend.all_reduce(one)
        there = "rank 11 is in all_gather of 4096 B bfloat16 along dim 1 at job 17"
        assert there in str(caught.value)
        assert "in all_reduce of 1024 B float32 at job 16" in str(caught.value)
        assert "group 'tp:0' [ranks 10, 11, 12, 13]" in str(caught.value)
        with pytest.raises(EngineError, match=r"failed before: the ranks of .* diverged"):
            backend.all_reduce(torch.ones(256))
    with opened() as backend:
        backend.enter_job(4 if PLACE == 3 else 5)
        with pytest.raises(DivergenceError, match="job 4"):
            backend.broadcast(torch.ones(256), 2)


def check_late_rank() -> None:
    with opened(timeout_s=0.2) as backend:
        if PLACE != 3:
            with pytest.raises(StepTimeoutError, match=r"rank 13 .* within 0\.2 s"):
                backend.all_reduce(torch.ones(2))


def check_closed_rank() -> None:
    with opened() as backend:
        backend.all_reduce(torch.ones(2))
        if PLACE == 2:
            backend.close()
        else:
            with pytest.raises(RankLostError, match="rank 12 closed"):
                backend.reduce_scatter(torch.ones(8), 0)


def reduce_until_somebody_dies() -> None:
    """Two-phase operations without a pause, so that the kill is in the middle of one."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it as soon as a rank is gone
    with opened() as backend:
        x = torch.ones(1 << 20)
        for _ in range(20):
            backend.all_reduce(x)
        print(f"place {PLACE} pid {os.getpid()} reduces", flush=True)
        try:
            while True:
                backend.all_reduce(x)
        except RankLostError as error:
            print(f"place {PLACE} lost: {error}", flush=True)
            os._exit(0)


def main() -> None:
    dist.init_process_group("gloo")
    check_refusals()
    check_that_waiting_leaves_the_interpreter_free()
    check_divergence()
    check_late_rank()
    check_closed_rank()
    reduce_until_somebody_dies()


if __name__ == "__main__":
    main()
