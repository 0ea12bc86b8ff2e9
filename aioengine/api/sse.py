"""Server-sent events: `data: <json>` and a blank line, closed by `data: [DONE]`.

A token of a small model costs less to compute than to send, so what is alike in all events of a
stream is encoded once, and events go straight to the connection: no coroutine, one write.
"""

from collections.abc import Iterable
from typing import Final

import msgspec
from aiohttp import hdrs, web

from aioengine.api.metrics import HTTP_METRICS

encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"


def event(message: object) -> bytes:
    return b"data: " + encode(message) + b"\n\n"


class EventTemplate:
    """An event in which one text changes."""

    GAP: Final = "\0"
    """Stands for the text in the example."""

    def __init__(self, example: object) -> None:
        """`example`: a message with GAP as a text of its own, once."""
        self._before, self._after = event(example).split(encode(self.GAP))

    def fill(self, text: str) -> bytes:
        return self._before + encode(text) + self._after


class EventStream:
    """One SSE response. Events of one call leave in one write."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._is_chunked = True
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )

    async def open(self, events: Iterable[bytes] = ()) -> None:
        await self.response.prepare(self._request)
        self._request.writer.send_headers()
        self._is_chunked = self.response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
        self.write_nowait(events)

    def write_nowait(self, events: Iterable[bytes]) -> bool:
        """False when the client reads so slowly that `drain` should come before the next events.

        What `StreamResponse.write` does, without its five calls. Events to a client that has left
        are dropped; aiohttp cancels the handler.
        """
        transport = self._request.transport
        if transport is None or transport.is_closing():
            return True
        if data := b"".join(events):
            if self._is_chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            transport.write(data)
        return not self._request.protocol.writing_paused

    async def drain(self) -> None:
        """Return once the client has read most of what was written. Raises ConnectionError."""
        figures = self._request.app[HTTP_METRICS]
        figures.num_slow_readers += 1
        try:
            await self._request.writer.drain()
        finally:
            figures.num_slow_readers -= 1

    async def close(self, events: Iterable[bytes] = ()) -> None:
        self.write_nowait([*events, DONE])
        await self.response.write_eof()
