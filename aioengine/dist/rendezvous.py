"""The store that all ranks of a launch can reach: torchrun's, or one that rank 0 opens.

torch's client of it keeps no limit: it goes on for a multiple of its time-out when the server goes
away, and for ever when the server is frozen. So whoever waits here sets a limit of its own.
"""

import errno
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final, TypeVar

from torch.distributed import (
    PrefixStore,
    Store,
    TCPStore,
    get_rank,
    get_world_size,
    is_initialized,
)
from torch.distributed.distributed_c10d import _get_default_store

from aioengine.dist.interface import LOOPBACK, means_loopback
from aioengine.dist.launcher_env import LauncherEnv
from aioengine.errors import StartupError, StartupTimeoutError

T = TypeVar("T")
POLL_S: Final = 0.2
"""Nothing tells when a port begins to listen."""


class LauncherStore:
    """Keys and values that ranks share until they have met. Every call blocks.

    Raises StartupError once whoever serves it is gone.
    """

    def __init__(self, store: Store, where: str) -> None:
        self._store = store
        self._where = where

    def set(self, key: str, value: str) -> None:
        self._ask(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        return self._ask(self._store.get, key)

    def check(self, keys: list[str]) -> bool:
        return self._ask(self._store.check, keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Sets `key` if it holds `expected`, or is absent and that is empty; what it holds now."""
        return self._ask(self._store.compare_set, key, expected, desired)

    def _ask(self, call: Callable[..., T], *args: object) -> T:
        try:
            return call(*args)
        except RuntimeError as error:  # torch's DistErrors are RuntimeErrors
            raise StartupError(
                f"the launcher's store at {self._where} is gone, and rank 0 or its launcher with "
                f"it ({first_line(error)})"
            ) from None


def open_launcher_store(
    env: LauncherEnv, timeout_s: float, may_serve: bool = True
) -> LauncherStore:
    """The launch's store, served by this process if that is rank 0's part (and it may). Blocks
    until it answers.

    In a trainer's world it is the store on which that was made; StartupError when that is not the
    world of the launch.

    It may hold keys of an earlier attempt (`--max-restarts` keeps the port): see
    `control/bootstrap.py`. Raises StartupError for a port that is in use and for a torchrun that has
    ended, StartupTimeoutError when nobody answers.
    """
    if is_initialized():
        _check_trainers_world(env)
        trainers = PrefixStore(f"aioengine/{env.job}", _get_default_store())
        return LauncherStore(trainers, "torch.distributed's own")
    deadline = time.monotonic() + timeout_s
    host, listener = env.master_addr, None
    serves = env.hosts_store and may_serve
    if serves:
        host, listener = LOOPBACK, _listen(env)
    try:
        if listener is None:
            _wait_listening(host, env.master_port, deadline, env.agent_hosts_store)
        store = TCPStore(
            host,
            env.master_port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
    except (RuntimeError, OSError) as error:  # torch's DistErrors are RuntimeErrors
        raise StartupTimeoutError(_describe_silence(env, timeout_s, error)) from None
    where = f"{env.master_addr}:{env.master_port}"
    return LauncherStore(PrefixStore(f"aioengine/{env.job}", store), where)


def _check_trainers_world(env: LauncherEnv) -> None:
    """Ranks of another world would wait for each other on a store that they do not share."""
    found = (get_rank(), get_world_size())
    if found != (env.rank, env.world_size):
        raise StartupError(
            f"torch.distributed is initialised: this is rank {found[0]} of {found[1]} there, but "
            f"rank {env.rank} of {env.world_size} for the launcher; the engine runs in all ranks "
            "of a launch, in their order"
        )


def _listen(env: LauncherEnv) -> socket.socket:
    """Rank 0's port: on every address, unless it is certain that all ranks come by loopback."""
    try:
        if env.master_addr == LOOPBACK:
            return socket.create_server((LOOPBACK, env.master_port))
        if socket.has_dualstack_ipv6():
            anywhere = ("", env.master_port)
            return socket.create_server(anywhere, family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", env.master_port))
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else f"does not open ({error})"
        raise StartupError(
            f"rank 0 cannot open the rendezvous: port {env.master_port} ({env.master_source}) "
            f"{reason} on {socket.gethostname()}; set MASTER_PORT to another one on all ranks"
        ) from None


def _wait_listening(host: str, port: int, deadline: float, was_opened_before: bool) -> None:
    """Until a connection is accepted. Raises the OSError of the last attempt at the deadline, or
    at once when a port refuses that was open before this process was started."""
    while True:
        left_s = max(deadline - time.monotonic(), POLL_S)
        try:
            socket.create_connection((host, port), left_s).close()
            return
        except OSError as error:
            is_over = was_opened_before and isinstance(error, ConnectionRefusedError)
            if is_over or time.monotonic() + POLL_S > deadline:
                raise
        time.sleep(POLL_S)


def _describe_silence(env: LauncherEnv, timeout_s: float, error: Exception) -> str:
    advice = ""
    if means_loopback(env.master_addr) and not env.is_single_node:
        advice = f"; {env.master_addr} is every node itself, so give torchrun --master-addr"
    waited = ""
    if not (env.agent_hosts_store and isinstance(error, ConnectionRefusedError)):
        waited = f" within the {timeout_s:.1f} s that were left of --startup-timeout-seconds"
    return (
        f"rank {env.rank} does not reach the launcher's store at {env.master_addr}:"
        f"{env.master_port} ({env.master_source}){waited}; rank 0 or its launcher is not "
        f"there{advice} ({first_line(error)})"
    )


def first_line(error: Exception) -> str:
    """Without the C++ frames that torch adds."""
    return str(error).partition("\n")[0]
