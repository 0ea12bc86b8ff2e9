"""What any launcher's variables come to, and how single ones are read."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from aioengine.dist.interface import LOOPBACK

Environment: TypeAlias = Mapping[str, str]
Kind: TypeAlias = Literal["torchrun", "srun", "openmpi", "none"]

MAX_PORT: Final = 65535
FIRST_RENDEZVOUS_PORT: Final = 15_000
NUM_RENDEZVOUS_PORTS: Final = 13_999
"""A prime number. The range ends below torchrun's own port, Kubernetes' node ports and those that
kernels hand out by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherEnv:
    """One process of a launch. `node` names the launcher's node, not the host."""

    kind: Kind
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: str = "0"
    master_addr: str = LOOPBACK
    master_port: int = 0
    master_source: str = "MASTER_ADDR and MASTER_PORT"
    """Where address and port of the rendezvous come from, for errors about them."""
    job: str = ""
    """Keeps the keys of launches apart that meet in one store by mistake."""
    agent_hosts_store: bool = False
    restart_count: int = 0
    error_file: str | None = None
    """Where torchelastic looks for the reason of a failure."""
    job_end: float | None = None
    """Unix seconds; whichever launcher started this process inside a job."""
    job_secret: bytes | None = None
    host_ip: str | None = None
    omp_num_threads: int | None = None
    echo: str = ""
    """The launcher variables that were used, for the log, and sets that were not."""

    @property
    def is_single_node(self) -> bool:
        return self.local_world_size == self.world_size

    @property
    def hosts_store(self) -> bool:
        """Whether this rank itself opens the store at which all ranks meet."""
        return self.rank == 0 and self.world_size > 1 and not self.agent_hosts_store


def read_number(environ: Environment, name: str, default: int | None = None) -> int:
    """Raises ValueError that names the variable and what it holds."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch("[0-9]{1,18}", text):
        raise ValueError(f"{name} must be a number, found {text!r}")
    return int(text)


def read_index(environ: Environment, name: str, limit: int, of: str) -> int:
    """A number below `limit`, which `of` describes. Raises ValueError with both."""
    index = read_number(environ, name)
    if index >= limit:
        raise ValueError(f"{name} {index} does not fit {of}")
    return index


def read_port(environ: Environment) -> int | None:
    """MASTER_PORT, if it is set."""
    if "MASTER_PORT" not in environ:
        return None
    port = read_number(environ, "MASTER_PORT")
    if not 0 < port <= MAX_PORT:
        raise ValueError(f"MASTER_PORT must be between 1 and {MAX_PORT}, found {port}")
    return port


def rendezvous_port(number: int) -> int:
    """The port of the launch with this number; numbers that are near differ."""
    return FIRST_RENDEZVOUS_PORT + number % NUM_RENDEZVOUS_PORTS
