"""Asks the trace threads of all ranks, of all replicas, those that have failed included."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec

from aioengine.control.handshake import dial
from aioengine.errors import HandshakeError
from aioengine.limits import MAX_TRACE_ANSWER_BYTES
from aioengine.messages import Member
from aioengine.trace_messages import TraceAnswer, TraceQuestion

ANSWER_S: Final = 3.0
decode_answer = msgspec.msgpack.Decoder(TraceAnswer).decode


class Tracer:
    """One front end's way to the trace threads. A connection lives for one question, so that
    nothing has to be kept up or found broken. Loop thread only."""

    def __init__(self, members: Sequence[Member], rank: int, key: bytes) -> None:
        """`rank` carries the front end; `key` is that of the attempt."""
        self.members = members
        self._rank = rank
        self._key = key

    async def ask(self, question: TraceQuestion) -> list[TraceAnswer | str]:
        """The answer of every rank, in order, or why there is none."""
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(self._ask(member, question)) for member in self.members]
        return [task.result() for task in asking]

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
            return f"no answer within {ANSWER_S:g} s: its process is stopped or unreachable"
        except (HandshakeError, ConnectionError, msgspec.DecodeError) as error:
            return f"no answer: {error}"
