"""The `collective_rpc` calls of one replica that are in flight."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from aioengine.control.watch import Failure
from aioengine.errors import EngineError, ReplicaFailedError, RpcTimeoutError, WorkerError
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
        self._closed_cause: str | None = None

    def check_open(self) -> None:
        """Raises ReplicaFailedError, with the first cause, once nobody answers any more."""
        if self._closed_cause is not None:
            raise ReplicaFailedError(self._closed_cause)

    def begin(self, seq: int, call: RemoteCall) -> None:
        self._pending[seq] = _Pending(call, asyncio.get_running_loop().create_future())

    async def result(self, seq: int, timeout_s: float | None) -> Any:
        """The values in rank order, or the one that was asked for.

        Raises WorkerError as soon as the method has raised on a rank, RpcTimeoutError that names
        the ranks without an answer, and what `fail` and `end` say.
        """
        pending = self._pending[seq]
        try:
            await asyncio.wait([pending.ended], timeout=timeout_s)
            if not pending.ended.done():
                raise RpcTimeoutError(self._describe_late(pending, timeout_s))
            pending.ended.result()
        finally:
            del self._pending[seq]
        values = [self._decoded(pending, rank) for rank in self._wanted(pending.call)]
        return values if pending.call.reply_rank is None else values[0]

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
        self._close(failure.error)

    def end(self, cause: str) -> None:
        """The replica ends in order: no more replies will come."""
        self._close(ReplicaFailedError(cause))

    def _close(self, error: EngineError) -> None:
        if self._closed_cause is None:
            self._closed_cause = str(error)
        for pending in self._pending.values():
            if not pending.ended.done():
                pending.ended.set_exception(error)
                pending.ended.exception()  # seen, where the caller is just giving up

    def _wanted(self, call: RemoteCall) -> list[int]:
        """Ranks in the replica."""
        return [rank for rank in range(len(self._ranks)) if call.wants_value_of(rank)]

    def _decoded(self, pending: _Pending, rank: int) -> Any:
        try:
            return decode_value(pending.values[rank])
        except ValueError as error:
            where = f"{self._ranks[rank]}: {pending.call.method}"
            raise WorkerError(where, "ValueError", str(error), "") from None

    def _describe_late(self, pending: _Pending, timeout_s: float | None) -> str:
        late = [str(info) for rank, info in enumerate(self._ranks) if rank not in pending.values]
        return (
            f"collective_rpc {pending.call.method!r}: no answer from {', '.join(late)} within its "
            f"timeout of {timeout_s:g} s"
        )
