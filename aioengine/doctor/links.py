"""The TCP matrix: which ranks reach which, and how long a small message takes there and back."""

import asyncio
import os
import secrets
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from aioengine.control.channel import Connection
from aioengine.control.handshake import NONCE_BYTES, prove
from aioengine.doctor.meeting import reception
from aioengine.doctor.messages import MAX_FRAME_BYTES, Cell, Target
from aioengine.errors import HandshakeError
from aioengine.handshake_messages import Endpoint, Hello
from aioengine.limits import MAX_HANDSHAKE_FRAME_BYTES

ALL_PAIRS_UP_TO: Final = 64
"""Ranks of a launch in which every rank dials every other one."""
NUM_STRIDES: Final = 48
"""Ranks that each dials in a larger launch, beside those that it shares a group with."""
WINDOW: Final = 64
"""Connections that a rank opens at a time, so that one dead host costs one limit, not many."""
DIAL_LIMIT_S: Final = 3.0
ECHO_LIMIT_S: Final = 1.0
NUM_ECHOES: Final = 5
BULK_BYTES: Final = 128 * 2**10
"""More than any packet: where large packets are lost, small echoes return and this one does not."""


class Echo(msgspec.Struct, frozen=True, tag="echo"):
    payload: bytes = b""


class Echoed(msgspec.Struct, frozen=True, tag="echoed"):
    """The payload again, and who received it."""

    rank: int
    pid: int
    payload: bytes


def partners(rank: int, ranks: Sequence[int], mates: Sequence[int]) -> list[int]:
    """Whom `rank` dials, of all `ranks` that came (ascending): everybody, or in a large launch
    the `mates` of its groups and ranks at fixed distances, near and far.

    Starts behind the rank itself, so that in the same moment no two ranks dial the same one.
    """
    at = ranks.index(rank)
    turned = [*ranks[at + 1 :], *ranks[:at]]
    if len(ranks) <= ALL_PAIRS_UP_TO:
        return turned
    near = range(NUM_STRIDES // 2)
    far = [i * len(turned) // (NUM_STRIDES // 2) for i in range(NUM_STRIDES // 2)]
    chosen = {turned[i] for i in (*near, *far)} | set(mates)
    return [partner for partner in turned if partner in chosen]


class EchoDesk:
    """Answers the probes that other ranks send to this one."""

    def __init__(self, tasks: asyncio.TaskGroup, key: bytes, rank: int) -> None:
        self._rank = rank
        self._reception = reception(tasks, key, self._on_guest)
        self._open: set[Connection] = set()

    async def open(self, host: str) -> Endpoint:
        """Raises OSError when `host` is no address of this process."""
        return await self._reception.open(host)

    def close(self) -> None:
        self._reception.close()
        for connection in self._open:
            connection.close()

    def _on_guest(self, hello: Hello, connection: Connection) -> None:
        def answer(echo: Echo) -> None:
            connection.send(Echoed(self._rank, os.getpid(), echo.payload))

        self._open.add(connection)
        connection.start(Echo, answer, lambda reason: self._open.discard(connection))


async def dial_all(
    rank: int, key: bytes, targets: Sequence[Target], limit_s: float
) -> tuple[Cell, ...]:
    """One cell for every target, soon after `limit_s` at the latest.

    Ways are connected side by side, then timed one by one, then loaded side by side: one that
    hangs costs its limit once.
    """
    deadline = time.monotonic() + limit_s
    cells: list[Cell] = []
    for start in range(0, len(targets), WINDOW):
        dials = [_Dial(rank, key, target) for target in targets[start : start + WINDOW]]
        async with asyncio.TaskGroup() as tasks:
            for dial in dials:
                tasks.create_task(dial.connect(deadline), name="connect")
        for dial in dials:
            await dial.time_echoes(deadline)
        async with asyncio.TaskGroup() as tasks:
            for dial in dials:
                tasks.create_task(dial.load(deadline), name="load")
        cells += [dial.cell for dial in dials]
    return tuple(cells)


class _Dial:
    """One probe. Owns its connection until `load` is over or something failed."""

    def __init__(self, rank: int, key: bytes, target: Target) -> None:
        self.cell = Cell(source=rank, target=target.rank)
        self._rank = rank
        self._key = key
        self._target = target
        self._connection: Connection | None = None

    async def connect(self, deadline: float) -> None:
        host, port = self._target.endpoint.host, self._target.endpoint.port
        hello = Hello(rank=self._rank, role="probe", nonce=secrets.token_bytes(NONCE_BYTES))
        limit_s, began = _limit(deadline, DIAL_LIMIT_S), time.perf_counter()
        if not limit_s:
            self._fail("untried", "time was over")
            return
        try:
            async with asyncio.timeout(limit_s):
                _, self._connection = await asyncio.get_running_loop().create_connection(
                    lambda: Connection(MAX_HANDSHAKE_FRAME_BYTES), host, port
                )
                self._set(connect_us=_us(time.perf_counter() - began))
                await prove(self._connection, f"{host}:{port}", hello, self._key)
        except (OSError, TimeoutError, HandshakeError) as error:
            reason = str(error) or f"no answer within {limit_s:.1f} s"
            self._fail("connect" if self._connection is None else "proof", reason)
        else:
            self._connection.max_frame_bytes = MAX_FRAME_BYTES

    async def time_echoes(self, deadline: float) -> None:
        if self._connection is None:
            return
        limit_s = _limit(deadline, ECHO_LIMIT_S)
        try:
            async with asyncio.timeout(limit_s):
                times = [await self._echo(self._connection, b"") for _ in range(NUM_ECHOES)]
        except (ConnectionError, TimeoutError, HandshakeError, msgspec.MsgspecError) as error:
            self._fail("echo", str(error) or f"no echo within {limit_s:.1f} s")
        else:
            self._set(round_trip_us=_us(min(times)))

    async def load(self, deadline: float) -> None:
        """What is larger than a packet must come back, too."""
        if self._connection is None:
            return
        limit_s = _limit(deadline, DIAL_LIMIT_S)
        try:
            async with asyncio.timeout(limit_s):
                await self._echo(self._connection, bytes(BULK_BYTES))
        except (ConnectionError, TimeoutError, HandshakeError, msgspec.MsgspecError) as error:
            what = f"{BULK_BYTES // 2**10} KiB did not come back within {limit_s:.1f} s"
            self._fail("load", str(error) or what)
        else:
            self._connection.close()

    async def _echo(self, connection: Connection, payload: bytes) -> float:
        """Seconds there and back."""
        began = time.perf_counter()
        connection.send(Echo(payload))
        answer = msgspec.msgpack.decode(await connection.receive(), type=Echoed)
        took = time.perf_counter() - began
        if (answer.rank, answer.pid) != (self._target.rank, self._target.pid):
            raise HandshakeError(
                f"rank {answer.rank} (pid {answer.pid}) answers at this address; two hosts have it"
            )
        return took

    def _fail(self, failed: str, error: str) -> None:
        self._set(failed=failed, error=error)
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _set(self, **fields: float | str) -> None:
        self.cell = msgspec.structs.replace(self.cell, **fields)


def _limit(deadline: float, most_s: float) -> float:
    return max(0.0, min(most_s, deadline - time.monotonic()))


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
