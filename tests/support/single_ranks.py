"""Ranks of one launch that are started one by one, each a process of its own."""

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from support.launching import Launch, rank_command
from torch.distributed import TCPStore


class SingleRanks:
    """Starts ranks with torchrun's variables; nothing ends them but themselves, or leaving."""

    def __init__(self, world_size: int, *flags: str) -> None:
        self.store = new_store()
        self.launches: dict[int, Launch] = {}
        self._world_size = world_size
        self._flags = flags
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(exc_type, exc, traceback)

    def start(self, rank: int, store: TCPStore | None = None) -> Launch:
        """`store`: in place of the one at which the others meet."""
        port = (store or self.store).port
        launch = Launch(
            *self._flags,
            command=rank_command(1),
            env={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self._world_size),
                "LOCAL_WORLD_SIZE": str(self._world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
        )
        self.launches[rank] = self._stack.enter_context(launch)
        return launch


def new_store() -> TCPStore:
    """As a launcher's agent serves it."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
