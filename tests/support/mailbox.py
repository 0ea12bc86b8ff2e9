"""The test's end of a control link."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from aioengine.control.channel import Link

T = TypeVar("T")
LIMIT_S = 5.0
TURNS = 10


async def settle() -> None:
    """Let the loop run what is due: enough turns for a message to come and to be answered."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Mailbox:
    """Keeps what comes over a link, and waits for it."""

    def __init__(self, link: Link, kind: Any) -> None:
        self.link = link
        self.messages: list[Any] = []
        self.closed: list[str] = []
        """Reasons; at most one."""
        self._num_read = 0
        self._changed = asyncio.Event()
        link.start(kind, self.on_message, self._on_closed)

    def on_message(self, message: Any) -> None:
        self.messages.append(message)
        self._changed.set()

    def _on_closed(self, reason: str) -> None:
        self.closed.append(reason)
        self._changed.set()

    def send(self, message: msgspec.Struct) -> None:
        self.link.send(message)

    async def until(self, condition: Callable[[], T]) -> T:
        """Wait until news make `condition` true."""
        async with asyncio.timeout(LIMIT_S):
            while not (value := condition()):
                self._changed.clear()
                await self._changed.wait()
        return value

    async def next(self, kind: type[T]) -> T:
        """The next message of a type; those before it count as read."""
        return await self.until(lambda: self._read(kind))

    async def until_closed(self) -> str:
        await self.until(lambda: self.closed)
        return self.closed[0]

    def of(self, kind: type[T]) -> list[T]:
        """Every message of a type so far."""
        return [message for message in self.messages if isinstance(message, kind)]

    def _read(self, kind: type[T]) -> T | None:
        while self._num_read < len(self.messages):
            message = self.messages[self._num_read]
            self._num_read += 1
            if isinstance(message, kind):
                return message
        return None
