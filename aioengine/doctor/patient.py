"""A rank's side of an examination: it answers what rank 0 asks, until the verdict."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from typing import Any, assert_never

import msgspec

from aioengine.control.bootstrap import run_in_daemon_thread
from aioengine.control.channel import Link
from aioengine.doctor.bench import DeviceBench, no_device
from aioengine.doctor.host import gather_facts
from aioengine.doctor.links import EchoDesk, dial_all
from aioengine.doctor.messages import (
    Claim,
    Dial,
    Dialled,
    Facts,
    Measure,
    Measured,
    OpenStore,
    Order,
    Ping,
    Pong,
    StoreOpened,
    Verdict,
)
from aioengine.engine.device import DeviceThread
from aioengine.errors import RankLostError, WorkerError
from aioengine.rank.place import Place


class Patient:
    """One rank in one attempt of the launch, whose connections know `key`.

    Owns its echo desk and its device thread. Tasks belong to `tasks`.
    """

    def __init__(
        self, tasks: asyncio.TaskGroup, place: Place, environ: Mapping[str, str], key: bytes
    ) -> None:
        self._tasks = tasks
        self._place = place
        self._environ = environ
        self._key = key
        self._desk = EchoDesk(tasks, key, place.rank)
        self._device = DeviceThread(asyncio.get_running_loop())
        self._bench = DeviceBench(place)
        self._jobs: list[asyncio.Task[None]] = []

    async def open(self) -> Facts:
        """Answer probes from now on, and say who and where this rank is."""
        endpoint, error_text = None, ""
        try:
            endpoint = await self._desk.open(self._place.address)
        except OSError as error:
            error_text = str(error)
        # In a thread: a name server may take its time.
        return await run_in_daemon_thread(
            gather_facts, self._place, self._environ, endpoint, error_text
        )

    def close(self) -> None:
        """Nothing is waited for: the device thread may be stuck."""
        self._desk.close()
        for job in self._jobs:
            job.cancel()

    async def attend(self, link: Link, facts: Facts) -> int:
        """Claim this rank's place, answer, and return the exit status of the verdict.

        Raises RankLostError when rank 0 goes away before.
        """
        verdict: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_order(order: Order) -> None:
            match order:
                case Ping():
                    received = time.time_ns()
                    link.send(Pong(order.number, received, time.time_ns(), self._bench.doing))
                case Dial():
                    self._start("dial", self._dial(link, order))
                case OpenStore():
                    self._start("open the store", self._open_store(link))
                case Measure():
                    self._start("time the groups", self._measure(link, order))
                case Verdict():
                    if not verdict.done():
                        verdict.set_result(order.exit_status)
                case _:
                    assert_never(order)

        def on_closed(reason: str) -> None:
            if not verdict.done():
                verdict.set_exception(
                    RankLostError(f"rank 0 is gone before it gave its verdict: {reason}")
                )

        link.send(Claim(facts, msgspec.json.encode(self._place.config)))
        link.start(Order, on_order, on_closed)
        self._start("open the device", self._open_device(link))
        try:
            return await verdict
        finally:
            link.close()

    def _start(self, name: str, job: Coroutine[Any, Any, None]) -> None:
        self._jobs.append(self._tasks.create_task(job, name=name))

    async def _open_device(self, link: Link) -> None:
        try:
            link.send(await self._device.run(self._bench.open_device))
        except WorkerError as error:
            link.send(no_device(f"{error.type_name}: {error.message}"))

    async def _dial(self, link: Link, order: Dial) -> None:
        cells = await dial_all(self._place.rank, self._key, order.targets, order.limit_s)
        link.send(Dialled(cells))

    async def _open_store(self, link: Link) -> None:
        try:
            port = await self._device.run(self._bench.open_store, self._place.address)
        except WorkerError as error:
            link.send(StoreOpened(0, f"{error.type_name}: {error.message}"))
        else:
            link.send(StoreOpened(port))

    async def _measure(self, link: Link, order: Measure) -> None:
        try:
            timings = await self._device.run(self._bench.measure, order.endpoint, order.limit_s)
        except WorkerError as error:
            first_line = error.message.partition("\n")[0]  # C++ frames follow
            link.send(Measured((), f"{first_line} (while {self._bench.doing})"))
        else:
            link.send(Measured(timings))
