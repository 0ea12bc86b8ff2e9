"""Asks the trace threads of all ranks, of all replicas, those that have failed included."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from aioengine.control.channel import Connection
from aioengine.control.handshake import dial
from aioengine.errors import EngineError, HandshakeError, innermost
from aioengine.handshake_messages import Member
from aioengine.limits import MAX_TRACE_ANSWER_BYTES
from aioengine.timeline.clock import SAME_CLOCK, ClockOffset, estimate, own_clock
from aioengine.trace_messages import (
    AskClock,
    AskSteps,
    BeginRecording,
    ClockReading,
    RecordedSteps,
    RecordingBegan,
    RecordingRefused,
    TraceAnswer,
    TraceQuestion,
)

ANSWER_S: Final = 3.0
NO_ANSWER: Final = "no answer within {:g} s: its process is stopped or unreachable"
NUM_CLOCK_TRIPS: Final = 16
decode_answer = msgspec.msgpack.Decoder(TraceAnswer).decode


class RecordingError(EngineError):
    """No recording now; the message says why."""


@dataclass(frozen=True, slots=True)
class RecordedRank:
    recorded: RecordedSteps
    first_seq: int
    """Every rank of the replica has recorded the steps from here on."""
    clock: ClockOffset
    """To this process's clock."""


class Tracer:
    """One front end's way to the trace threads. A connection lives for one question, so that
    nothing has to be kept up or found broken. Loop thread only."""

    def __init__(self, members: Sequence[Member], rank: int, key: bytes) -> None:
        """`rank` carries the front end; `key` is that of the attempt."""
        self.members = members
        self._rank = rank
        self._key = key
        self._is_recording = False

    async def ask(self, question: TraceQuestion) -> list[TraceAnswer | str]:
        """The answer of every rank, in order, or why there is none."""
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(self._ask(member, question)) for member in self.members]
        return [task.result() for task in asking]

    async def record(
        self, replicas: Sequence[Sequence[Member]], num_steps: int, limit_s: float
    ) -> list[list[RecordedRank | str]]:
        """The next steps of every rank of these replicas, or why there are none. Returns when all
        ranks have recorded so many steps, at the latest after about `limit_s`.

        Raises RecordingError when a recording is under way.
        """
        if self._is_recording:
            raise RecordingError("steps are being recorded for somebody else")
        self._is_recording = True
        try:
            async with asyncio.TaskGroup() as tasks:
                recording = [
                    tasks.create_task(self._record(members, num_steps, limit_s))
                    for members in replicas
                ]
        except ExceptionGroup as group:
            raise innermost(group) from None
        finally:
            self._is_recording = False
        return [task.result() for task in recording]

    async def _record(
        self, members: Sequence[Member], num_steps: int, limit_s: float
    ) -> list[RecordedRank | str]:
        ranks = [_RankRecording(member) for member in members]
        try:
            async with asyncio.TaskGroup() as tasks:
                for rank in ranks:
                    tasks.create_task(rank.begin(self._rank, self._key))
            first_seq = 1 + max((rank.last_seq for rank in ranks), default=0)
            async with asyncio.TaskGroup() as tasks:
                collecting = [
                    tasks.create_task(rank.collect(AskSteps(first_seq, num_steps, limit_s)))
                    for rank in ranks
                ]
        finally:
            for rank in ranks:
                rank.close()
        return [task.result() for task in collecting]

    async def _ask(self, member: Member, question: TraceQuestion) -> TraceAnswer | str:
        assert member.trace is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = await dial(
                    member.trace, self._rank, "trace", self._key, MAX_TRACE_ANSWER_BYTES
                )
                try:
                    connection.send(question)
                    return decode_answer(await connection.receive())
                finally:
                    connection.close()
        except TimeoutError:
            return NO_ANSWER.format(ANSWER_S)
        except (HandshakeError, ConnectionError, msgspec.DecodeError) as error:
            return f"no answer: {error}"


class _RankRecording:
    """The recording of one rank, over a connection whose end ends it."""

    def __init__(self, member: Member) -> None:
        self._member = member
        self._connection: Connection | None = None
        self._error = ""
        self._clock = SAME_CLOCK
        self.last_seq = 0
        """The last job that this rank has not recorded."""

    async def begin(self, asker: int, key: bytes) -> None:
        """Raises RecordingError when the rank refuses: it may record for another front end."""
        assert self._member.trace is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                self._connection = await dial(
                    self._member.trace, asker, "trace", key, MAX_TRACE_ANSWER_BYTES
                )
                self._clock = await self._compare_clocks()
                answer = await self._ask(BeginRecording())
        except TimeoutError:
            self._error = NO_ANSWER.format(ANSWER_S)
        except (HandshakeError, ConnectionError, msgspec.DecodeError) as error:
            self._error = f"no answer: {error}"
        else:
            if isinstance(answer, RecordingRefused):
                raise RecordingError(f"{self._member.info}: {answer.reason}")
            assert isinstance(answer, RecordingBegan)
            self.last_seq = answer.last_seq

    async def collect(self, wanted: AskSteps) -> RecordedRank | str:
        if self._error:
            return self._error
        try:
            async with asyncio.timeout(wanted.limit_s + ANSWER_S):
                answer = await self._ask(wanted)
        except TimeoutError:
            return NO_ANSWER.format(wanted.limit_s + ANSWER_S)
        except (ConnectionError, msgspec.DecodeError) as error:
            return f"it ended while it recorded: {error}"
        if isinstance(answer, RecordingRefused):
            return answer.reason
        assert isinstance(answer, RecordedSteps)
        return RecordedRank(answer, wanted.first_seq, self._clock)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    async def _compare_clocks(self) -> ClockOffset:
        trips = []
        for _ in range(NUM_CLOCK_TRIPS):
            asked_ns = time.monotonic_ns()
            reading = await self._ask(AskClock())
            answered_ns = time.monotonic_ns()
            assert isinstance(reading, ClockReading)
            if reading.clock == own_clock():
                return SAME_CLOCK
            trips.append((asked_ns, reading.monotonic_ns, answered_ns))
        return estimate(trips)

    async def _ask(self, question: TraceQuestion) -> TraceAnswer:
        assert self._connection is not None
        self._connection.send(question)
        return decode_answer(await self._connection.receive())
