"""A loop in a thread of its own: its end never cancels or hangs a caller."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from aioengine.embedded.loop_thread import LoopEndedError, LoopThread


class Main:
    """Runs until told."""

    def __init__(self) -> None:
        self.end = asyncio.Event()
        self.was_cancelled = False

    async def __call__(self) -> None:
        try:
            await self.end.wait()
        except asyncio.CancelledError:
            self.was_cancelled = True


@asynccontextmanager
async def running() -> AsyncIterator[tuple[LoopThread, Main]]:
    main = Main()
    thread = LoopThread(main, "test loop")
    thread.start()
    try:
        yield thread, main
    finally:
        thread.tell(main.end.set)
        await thread.wait_gone()


async def add(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


async def divide() -> float:
    return 1 / 0


async def test_values_and_exceptions_come_back() -> None:
    async with running() as (thread, _):
        assert await thread.call(add, 1, b=2) == 3
        with pytest.raises(ZeroDivisionError):
            await thread.call(divide)


async def test_a_cancelled_caller_cancels_its_call() -> None:
    cancelled = threading.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with running() as (thread, _):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await thread.call(wait)
        await thread.call(add, 1, 1)  # behind the cancellation
        assert cancelled.wait(5)


async def test_the_loops_end_is_no_cancellation() -> None:
    async with running() as (thread, main):

        async def wait() -> None:
            main.end.set()
            await asyncio.Event().wait()

        with pytest.raises(LoopEndedError):
            await thread.call(wait)
        await thread.wait_gone()
        with pytest.raises(LoopEndedError):
            await thread.call(add, 1, 1)
        thread.tell(lambda: None)


async def test_calls_that_come_with_the_end_are_answered() -> None:
    """Whichever side is quicker: 200 races."""
    for _ in range(200):
        async with running() as (thread, main):
            thread.tell(main.end.set)
            with suppress(LoopEndedError):
                assert await thread.call(add, 1, 1) == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_callback_that_exits_leaves_nobody_waiting() -> None:
    """SystemExit ends a loop at once, and a thread in silence."""
    async with running() as (thread, _):
        thread.tell(sys.exit)
        with pytest.raises(LoopEndedError):
            await thread.call(asyncio.Event().wait)
        await thread.wait_gone()


async def test_main_can_be_cancelled() -> None:
    async with running() as (thread, main):
        await thread.call(add, 1, 1)
        thread.cancel()
        await thread.wait_gone()
        assert main.was_cancelled
