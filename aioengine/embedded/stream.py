"""One request of a program in the same process, as that program's own event loop sees it."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

from aioengine.errors import RequestFailedError
from aioengine.frontend.records import Update


class Sink:
    """What the engine's thread has told of a request. Unread updates of a choice merge at once, so
    that a program which blocks its thread holds no more than its tokens, and is woken once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """`loop` is the reader's."""
        self._loop = loop
        self._lock = threading.Lock()
        self._unread: dict[int, Update] = {}
        self._error: Exception | None = None
        self._has_ended = False
        self._is_waking = False
        """The reader's loop has been told of news, and has not looked yet."""
        self._news = asyncio.Event()

    # --- any thread

    def push(self, updates: list[Update]) -> None:
        with self._lock:
            for update in updates:
                if (unread := self._unread.get(update.index)) is not None:
                    unread.extend(update)
                else:
                    self._unread[update.index] = update
        self._wake_reader()

    def end(self, error: Exception | None) -> None:
        """Nothing follows."""
        with self._lock:
            self._error = error
            self._has_ended = True
        self._wake_reader()

    def _wake_reader(self) -> None:
        with self._lock:
            was_waking, self._is_waking = self._is_waking, True
        if not was_waking:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody reads any more
                self._loop.call_soon_threadsafe(self._look)

    # --- reader's thread

    async def next(self) -> Update:
        """Raises StopAsyncIteration behind the last one, or what ended the request."""
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError("a stream belongs to the event loop in which it was begun")
        while True:
            with self._lock:
                if self._unread:
                    return self._unread.pop(next(iter(self._unread)))
                if self._error is not None:
                    raise self._error
                if self._has_ended:
                    raise StopAsyncIteration
                self._news.clear()
            await self._news.wait()

    def _look(self) -> None:
        with self._lock:
            self._is_waking = False
        self._news.set()


class GenerationStream:
    """An async iterator of Updates, each what is new in one choice, and a context manager. Leaving
    the context, or dropping the stream, aborts what is not finished.

    The request begins when somebody iterates or enters; what is wrong with it is raised there, a
    ValueError. A beginning that was cut short begins again the next time. When its replica fails
    iteration raises RankLostError or ReplicaFailedError, when its phase ends first
    RequestFailedError.
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
        if (sink := self._sink) is None:
            sink = self._sink = Sink(asyncio.get_running_loop())
            try:
                await self._begin(sink)
            except BaseException:
                self._sink = None
                self._abort(sink)  # it may have begun when its beginning was cancelled
                sink.end(RequestFailedError("the request did not begin"))
                raise
        return sink
