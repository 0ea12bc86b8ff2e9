"""The `collective_rpc` calls of one replica that are in flight."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aioengine.control.watch import Failure
from aioengine.errors import WorkerError
from aioengine.messages import RankInfo, RemoteCall, RemoteFailed, RemoteReply
from aioengine.rpc import decode_value


@dataclass(slots=True)
class _Pending:
    call: RemoteCall
    ended: "asyncio.Future[None]"
    values: dict[int, bytes] = field(default_factory=dict)
    """By rank in the replica."""


class RemoteCalls:
    """Replies are matched by the call's place in the replica's sequence, so what comes late, for a
    call whose caller has given up, finds nobody and is dropped. Loop thread only."""

    def __init__(self, ranks: list[RankInfo]) -> None:
        """`ranks` of the replica, in order."""
        self._ranks = ranks
        self._first = ranks[0].rank
        self._pending: dict[int, _Pending] = {}

    def begin(self, seq: int, call: RemoteCall) -> None:
        self._pending[seq] = _Pending(call, asyncio.get_running_loop().create_future())

    async def wait(self, seq: int) -> Any:
        """The values in rank order, or the one that was asked for.

        Raises WorkerError as soon as the method has raised on a rank, and what `fail` says.
        """
        pending = self._pending[seq]
        await pending.ended
        values = [decode_value(v) for _, v in sorted(pending.values.items()) if v]
        return values if pending.call.reply_rank is None else values[0]

    def forget(self, seq: int) -> None:
        """The caller has its answer, or does not want one any more."""
        del self._pending[seq]

    def unanswered(self, seq: int) -> list[RankInfo]:
        values = self._pending[seq].values
        return [info for info in self._ranks if info.rank - self._first not in values]

    def on_reply(self, rank: int, reply: RemoteReply) -> None:
        pending = self._pending.get(reply.seq)
        if pending is None or pending.ended.done():
            return
        pending.values[rank - self._first] = reply.value
        if len(pending.values) == len(self._ranks):
            pending.ended.set_result(None)

    def on_failed(self, rank: int, failed: RemoteFailed) -> None:
        pending = self._pending.get(failed.seq)
        if pending is None or pending.ended.done():
            return
        where = f"{self._ranks[rank - self._first]}: {pending.call.method}"
        pending.ended.set_exception(
            WorkerError(where, failed.type_name, failed.message, failed.traceback)
        )

    def fail(self, failure: Failure) -> None:
        """The replica has failed: no more replies will come."""
        error = failure.in_flight_error(self._first)
        for pending in self._pending.values():
            if not pending.ended.done():
                pending.ended.set_exception(error)
