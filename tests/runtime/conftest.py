"""These tests run under uvloop, as the product does, and each leaves its loop clean."""

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop
from support.mailbox import settle

TEST_LIMIT_S = 10.0


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        item.obj = guarded(item.obj)


def guarded(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., Any]:
    """Every wait in the test is bounded; it fails when a task is left or a callback raised."""

    @functools.wraps(test)
    async def run(*args: Any, **kwargs: Any) -> None:
        raised: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: raised.append(context))
        before = asyncio.all_tasks()
        async with asyncio.timeout(TEST_LIMIT_S):
            await test(*args, **kwargs)
        await settle()
        assert not raised
        assert not asyncio.all_tasks() - before

    return run
