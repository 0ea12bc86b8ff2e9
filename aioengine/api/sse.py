"""Server-sent events: `data: <json>` and a blank line, closed by `data: [DONE]`."""

from collections.abc import Iterable

import msgspec
from aiohttp import web

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(message: object) -> bytes:
    return b"data: " + encode(message) + b"\n\n"


class EventStream:
    """One SSE response. Events of one call leave in one write."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self) -> None:
        await self.response.prepare(self._request)

    async def send(self, messages: Iterable[object]) -> None:
        if data := b"".join(map(event, messages)):
            await self.response.write(data)

    async def close(self) -> None:
        await self.response.write(DONE)
        await self.response.write_eof()
