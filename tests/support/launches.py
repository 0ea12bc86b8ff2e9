"""Bootstraps of several ranks in one loop, over a store in memory."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import msgspec
from support.connections import HOST

from aioengine.config import EngineConfig
from aioengine.control.bootstrap import Bootstrap, Seat
from aioengine.control.deadline import Deadline
from aioengine.handshake_messages import Endpoint, Member, Roster
from aioengine.messages import RankInfo

CONFIG = EngineConfig(startup_timeout_seconds=5.0)


class DictStore:
    """What the bootstrap uses of torch's Store, for threads of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self._waiting: dict[str, Callable[[], object]] = {}

    async def wait_set(self, key: str, *, after: bytes | None = None) -> bytes:
        """Wait until `key` holds something else than `after`, and return it."""
        loop = asyncio.get_running_loop()
        is_set = asyncio.Event()
        with self.lock:
            self._waiting[key] = lambda: loop.call_soon_threadsafe(is_set.set)
        while self.values.get(key) == after:
            await is_set.wait()
            is_set.clear()
        with self.lock:
            del self._waiting[key]
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        with self.lock:
            self.values[key] = value.encode()
            if key in self._waiting:
                self._waiting[key]()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """As torch's stores do: an absent key counts as empty, and the value it has now returns."""
        with self.lock:
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = desired.encode()
            return self.values.get(key, expected.encode())

    def get(self, key: str) -> bytes:
        with self.lock:
            return self.values[key]

    def check(self, keys: list[str]) -> bool:
        with self.lock:
            return all(key in self.values for key in keys)


def info(rank: int) -> RankInfo:
    return RankInfo(rank, f"dp0 pp0 tp{rank}", f"host{rank}", 1000 + rank)


class BootstrapRank:
    """One rank until it has its roster; its outcome is a Roster or the exception."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        store: DictStore | None,
        *,
        config: EngineConfig = CONFIG,
        secret: bytes | None = None,
        seats: Sequence[Seat] = (),
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.store = store
        self.config = config
        self.secret = secret
        self.seats = seats

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[tuple[Bootstrap, Roster]]:
        async with asyncio.TaskGroup() as tasks:
            bootstrap = Bootstrap(
                tasks,
                self.config,
                rank=self.rank,
                num_ranks=self.num_ranks,
                job_secret=self.secret,
                address=HOST,
                max_frame_bytes=2**20,
                deadline=Deadline(self.config.startup_timeout_seconds),
            )
            try:
                yield bootstrap, await bootstrap.join(self.store, self._entry, self.seats)
            finally:
                bootstrap.close()

    def _entry(self, endpoint: Endpoint | None) -> Member:
        config = msgspec.json.encode(self.config)
        node = f"node{self.rank}"
        return Member(info=info(self.rank), node=node, endpoint=endpoint, config=config)

    async def outcome(self) -> Roster | BaseException:
        try:
            async with self.joined() as (_, roster):
                return roster
        except ExceptionGroup as group:
            error: BaseException = group
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return error


async def outcomes(ranks: Sequence[BootstrapRank]) -> list[Roster | BaseException]:
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(rank.outcome()) for rank in ranks]
    return [task.result() for task in running]
