"""Calls of a front end that leaders answer: `collective_rpc` and prefix cache resets."""

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, Final

from aioengine.control.channel import Link
from aioengine.errors import (
    EngineError,
    RankLostError,
    ReplicaFailedError,
    RpcTimeoutError,
    WorkerError,
)
from aioengine.messages import CallEnded, ReplicaCall, ResetPrefixCache
from aioengine.rpc import decode_value

MakeCommand = Callable[[int], ReplicaCall | ResetPrefixCache]
"""From the id of a call."""


ERRORS: Final[dict[str, type[EngineError]]] = {
    error.__name__: error for error in (RpcTimeoutError, RankLostError, ReplicaFailedError)
}
"""What a leader answers when it was not the method that raised."""


class ReplicaCalls:
    """One link's calls in flight, each matched by an id of its own. Loop thread only."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._ids = itertools.count()
        self._pending: dict[int, asyncio.Future[bytes]] = {}

    async def call(self, make_command: MakeCommand) -> Any:
        """What the leader answers. Raises WorkerError when the method raised on a rank,
        RpcTimeoutError, RankLostError; ReplicaFailedError when the replica fails meanwhile. Not to
        be called on one that has failed."""
        call_id = next(self._ids)
        self._pending[call_id] = asyncio.get_running_loop().create_future()
        self._link.send(make_command(call_id))
        try:
            return decode_value(await self._pending[call_id])
        except ValueError as error:
            raise WorkerError("the answer of a replica", "ValueError", str(error), "") from None
        finally:
            del self._pending[call_id]

    def on_ended(self, ended: CallEnded) -> None:
        future = self._pending.get(ended.call_id)
        if future is None or future.done():
            return  # the caller has given up
        if not ended.error_type:
            future.set_result(ended.value)
        elif ended.where:
            future.set_exception(
                WorkerError(ended.where, ended.error_type, ended.message, ended.traceback)
            )
        else:
            future.set_exception(ERRORS.get(ended.error_type, EngineError)(ended.message))

    def fail(self, cause: str) -> None:
        """Nothing more will be answered: the replica has failed, or the front end ends."""
        for future in self._pending.values():
            if not future.done():
                future.set_exception(ReplicaFailedError(cause))
