"""One request of a program in the same process, as that program's own event loop sees it."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from aioengine.frontend.records import Update


class Sink:
    """What the engine's thread has told of a request. Unread updates of a choice merge."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` is the reader's."""
        self._loop = loop
        self._unread: dict[int, Update] = {}
        self._news = asyncio.Event()
        self._error: Exception | None = None
        self._has_ended = False

    # --- engine's thread

    def push(self, updates: list[Update]) -> None:
        self._tell_reader(self._take, updates)

    def end(self, error: Exception | None) -> None:
        """Nothing follows."""
        self._tell_reader(self._end, error)

    def _tell_reader(self, function: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # its loop is closed: nobody reads any more
            self._loop.call_soon_threadsafe(function, *args)

    # --- reader's thread

    async def next(self) -> Update:
        """Raises StopAsyncIteration behind the last one, or what ended the request."""
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._unread.pop(next(iter(self._unread)))

    def _take(self, updates: list[Update]) -> None:
        for update in updates:
            if (unread := self._unread.get(update.index)) is not None:
                unread.extend(update)
            else:
                self._unread[update.index] = update
        self._news.set()

    def _end(self, error: Exception | None) -> None:
        self._error = error
        self._has_ended = True
        self._news.set()


class GenerationStream:
    """An async iterator of Updates, each what is new in one choice, and a context manager. Leaving
    the context, or dropping the stream, aborts what is not finished.

    The request begins when somebody iterates or enters; what is wrong with it is raised there, a
    ValueError. When its replica fails iteration raises RankLostError or ReplicaFailedError, when
    its phase ends first RequestFailedError.
    """

    def __init__(
        self,
        begin: Callable[[Sink], Coroutine[Any, Any, None]],
        abort: Callable[[Sink], None],
    ) -> None:
        """`abort` may come at any time after `begin` was called, from any thread."""
        self._begin = begin
        self._abort = abort
        self._sink: Sink | None = None

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.abort()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        return await (await self._started()).next()

    async def collect(self) -> list[Update]:
        """Everything, as one Update per choice."""
        whole: dict[int, Update] = {}
        async with self:
            async for update in self:
                if update.index in whole:
                    whole[update.index].extend(update)
                else:
                    whole[update.index] = update
        return [update for _, update in sorted(whole.items())]

    def abort(self) -> None:
        """End the request; returns at once."""
        if self._sink is not None:
            self._abort(self._sink)

    def __del__(self) -> None:
        self.abort()

    async def _started(self) -> Sink:
        if self._sink is None:
            self._sink = Sink(asyncio.get_running_loop())
            await self._begin(self._sink)
        return self._sink
