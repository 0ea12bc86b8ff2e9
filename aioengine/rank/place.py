"""Where this process stands in a launch: all that is known before another rank is met."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from aioengine.config import EngineConfig, refuse_unsupported
from aioengine.control.deadline import Deadline, process_age_s
from aioengine.control.walltime import NO_END, Walltime
from aioengine.dist.launcher import own_address, read_environment
from aioengine.dist.launcher_env import LauncherEnv
from aioengine.engine.executor import Executor
from aioengine.engine.executor_backend import ExecutorBackend, load_executor
from aioengine.layout import ParallelLayout
from aioengine.messages import RankInfo


@dataclass(frozen=True, slots=True)
class Place:
    """One rank of a launch. `address` is where other ranks reach it."""

    config: EngineConfig
    env: LauncherEnv
    layout: ParallelLayout
    address: str
    startup: Deadline
    """`--startup-timeout-seconds`, from the start of the process; rank 0's once it is met."""
    walltime: Walltime = NO_END
    executor: type[ExecutorBackend] = Executor
    """What a leader uses."""

    @classmethod
    def find(cls, config: EngineConfig, environ: Mapping[str, str]) -> Self:
        """From flags and the launcher's variables. Raises ValueError naming what does not fit."""
        env = read_environment(environ)
        refuse_unsupported(config)
        layout = ParallelLayout.fit(
            env.world_size,
            tp_size=config.tensor_parallel_size,
            pp_size=config.pipeline_parallel_size,
            dp_size=config.data_parallel_size,
        )
        executor = load_executor(config.distributed_executor_backend)
        startup = Deadline(config.startup_timeout_seconds, process_age_s())
        walltime = Walltime(env.job_end, config.walltime_margin)
        address = own_address(env, config.host_ip)
        return cls(config, env, layout, address, startup, walltime, executor)

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def info(self) -> RankInfo:
        coords = str(self.layout.coords(self.rank))
        return RankInfo(self.rank, coords, socket.gethostname(), os.getpid())

    @property
    def title(self) -> str:
        """For `ps`."""
        return f"aioengine {self.info.coords} (rank {self.rank}/{self.env.world_size})"

    @property
    def is_leader(self) -> bool:
        return self.rank in self.layout.leaders

    @property
    def leader_rank(self) -> int:
        return self.layout.leader_of(self.rank)

    @property
    def peer_ranks(self) -> range:
        """The ranks that this one leads, if it leads."""
        return self.layout.replica(self.rank)[1:]

    @property
    def front_end_ranks(self) -> tuple[int, ...]:
        return tuple(self.layout.leaders) if self.config.api_ranks == "leaders" else (0,)

    @property
    def has_front_end(self) -> bool:
        return self.rank in self.front_end_ranks

    @property
    def other_front_ends(self) -> tuple[int, ...]:
        return tuple(rank for rank in self.front_end_ranks if rank != self.rank)
