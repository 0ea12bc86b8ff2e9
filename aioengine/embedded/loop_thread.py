"""An event loop in a thread of its own, and the way into it from a caller's loop."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

import uvloop

P = ParamSpec("P")
T = TypeVar("T")


class LoopEndedError(Exception):
    """The loop of a LoopThread does not run any more."""


class LoopThread:
    """Runs one coroutine until it ends; meanwhile callers of other threads run theirs beside it.

    The thread is a daemon and the loop installs no signal handlers: the process is somebody
    else's. `call` is for callers' loops, the other methods for any thread.
    """

    def __init__(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """`main` must not raise; it ends early when it is cancelled."""
        self._main = main
        self._loop = uvloop.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        # Re-entrant: the garbage collector may run a finalizer that calls `tell` under it.
        self._lock = threading.RLock()
        self._is_open = True
        self._calls: set[concurrent.futures.Future[Any]] = set()
        self._gone: concurrent.futures.Future[None] = concurrent.futures.Future()

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Cancel `main`; returns at once."""
        self.tell(lambda: self._task and self._task.cancel())

    def tell(self, function: Callable[[], Any]) -> None:
        """Run a function in the loop, unless that has ended; returns at once."""
        with self._lock:
            if self._is_open:
                self._loop.call_soon_threadsafe(function)

    async def call(
        self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run a coroutine in the loop and wait for it in the caller's.

        Raises what it raises, and LoopEndedError when the loop has ended, or ends first: its end
        never cancels the caller. The caller's cancellation cancels the coroutine.
        """
        with self._lock:
            if not self._is_open:
                raise LoopEndedError
            call = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop)
            self._calls.add(call)
        try:
            return await asyncio.wrap_future(call)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is not None and caller.cancelling():
                raise
            raise LoopEndedError from None
        finally:
            self._calls.discard(call)

    @property
    def is_gone(self) -> bool:
        return self._gone.done()

    async def wait_gone(self) -> None:
        """Until `main` and the thread have ended."""
        await asyncio.shield(asyncio.wrap_future(self._gone))
        self._thread.join()  # has nothing left to do

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._run_main())
        finally:  # also when a callback raised SystemExit, which ends the loop: callers wait
            self._gone.set_result(None)

    async def _run_main(self) -> None:
        self._task = asyncio.current_task()
        await self._main()
        with self._lock:
            self._is_open = False
        for call in list(self._calls):
            call.cancel()
        await asyncio.sleep(0)  # calls that had not begun begin, and are cancelled with the rest
