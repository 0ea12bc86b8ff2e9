"""Control links: framed msgpack over TCP between processes, or a pair in memory within one.

A frame is a 4-byte big-endian length and that many bytes of one msgpack message. Links belong to
the event loop's thread. Sending never waits: the amount in flight is bounded by admission and by
the number of plans in flight, and a peer that stops reading is cut off at `MAX_UNREAD_BYTES`.
"""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import msgspec

log = logging.getLogger(__name__)

HEADER_BYTES: Final = 4
MAX_UNREAD_BYTES: Final = 256 * 2**20
MAX_EARLY_FRAMES: Final = 64
"""Before `start`: a handshake's messages and the first few of the role."""
READ_BYTES: Final = 2**16
encode = msgspec.msgpack.Encoder().encode

OnMessage = Callable[[Any], None]
OnClosed = Callable[[str], None]


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes on the wire; encode once, send to many."""
    body = encode(message)
    return len(body).to_bytes(HEADER_BYTES, "big") + body


class Link(Protocol):
    """One end of a two-way, ordered message connection."""

    def start(self, kind: Any, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Deliver messages of the union `kind` (those that came before, too), then at most one
        `on_closed` with a reason, unless this side closed first."""

    def send(self, message: msgspec.Struct) -> None: ...

    def send_frame(self, data: bytes, message: msgspec.Struct) -> None:
        """Send `message`, of which `data` is the frame."""

    async def flush(self) -> None:
        """Return once everything sent has left this process."""

    def close(self) -> None: ...


class Connection(asyncio.Protocol):
    """A `Link` over TCP. Until `start`, frames wait for `receive` (the handshake)."""

    def __init__(
        self, max_frame_bytes: int, on_open: Callable[["Connection"], None] | None = None
    ) -> None:
        self.max_frame_bytes = max_frame_bytes
        self.peer = "?"
        self._on_open = on_open
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._frames: deque[bytes] = deque()  # before start: a handshake's few frames
        self._arrived = asyncio.Event()
        self._deliver: Callable[[bytes], None] | None = None
        self._on_closed: OnClosed | None = None
        self._closed_reason: str | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are asyncio.Transports in all but their base class.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(
            high=0
        )  # pause_writing until all is written: flush()
        name = transport.get_extra_info("peername")
        self.peer = f"{name[0]}:{name[1]}" if name else "?"
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._on_open is not None:
            self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._closed_reason is not None:
            return
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= HEADER_BYTES:
            size = int.from_bytes(buffer[start : start + HEADER_BYTES], "big")
            if size > self.max_frame_bytes:
                self._fail(f"frame of {size} bytes, the limit is {self.max_frame_bytes}")
                return
            end = start + HEADER_BYTES + size
            if len(buffer) < end:
                break
            self._take(bytes(buffer[start + HEADER_BYTES : end]))
            if self._closed_reason is not None:
                return  # nothing follows the end
            start = end
        del buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._writable.set()
        if exc is not None:
            self._read_rest()
        self._finish(f"connection closed ({exc})" if exc else "connection closed")

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # --- handshake

    async def receive(self) -> bytes:
        """The next frame's body. Raises ConnectionError when the connection has ended."""
        while not self._frames:
            if self._closed_reason is not None:
                raise ConnectionError(self._closed_reason)
            self._arrived.clear()
            await self._arrived.wait()
        return self._frames.popleft()

    # --- Link

    def start(self, kind: Any, on_message: OnMessage, on_closed: OnClosed) -> None:
        decode = msgspec.msgpack.Decoder(kind).decode

        def deliver(body: bytes) -> None:
            try:
                message = decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                self._fail(f"undecodable frame ({error})")
            else:
                on_message(message)

        ended_before = self._closed_reason
        self._deliver, self._on_closed = deliver, on_closed
        while self._frames:
            deliver(self._frames.popleft())
        if ended_before is not None and self._on_closed is not None:
            on_closed(ended_before)

    def send(self, message: msgspec.Struct) -> None:
        self.send_frame(frame(message), message)

    def send_frame(self, data: bytes, message: msgspec.Struct) -> None:
        if self._closed_reason is not None or self._transport is None:
            return  # on_closed has told the owner
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._fail(f"{self.peer} does not read: {MAX_UNREAD_BYTES} bytes wait")

    async def flush(self) -> None:
        await self._writable.wait()

    def close(self) -> None:
        self._on_closed = None
        self._frames.clear()
        if self._closed_reason is None:
            self._closed_reason = "closed by this side"
        self._arrived.set()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once, as a failure of the other side."""
        self._fail("ended by this side")

    # --- internals

    def _read_rest(self) -> None:
        """Take what the other side said before it hung up.

        A transport whose write fails reads no more, but the kernel still has what came before the
        reset: a Shutdown, or the cause of a failure. It closes the socket after `connection_lost`.
        """
        sock = self._transport.get_extra_info("socket") if self._transport is not None else None
        if sock is None:
            return
        while self._closed_reason is None:
            try:
                data = os.read(sock.fileno(), READ_BYTES)
            except OSError:  # nothing more is there, or the reset itself
                return
            if not data:
                return
            self.data_received(data)

    def _take(self, body: bytes) -> None:
        if self._deliver is not None:
            self._deliver(body)
        elif len(self._frames) == MAX_EARLY_FRAMES:
            self._fail(f"more than {MAX_EARLY_FRAMES} frames that nobody asked for")
        else:
            self._frames.append(body)
            self._arrived.set()

    def _fail(self, reason: str) -> None:
        log.warning("control connection with %s dropped: %s", self.peer, reason)
        self._frames.clear()
        self._finish(reason)
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, reason: str) -> None:
        if self._closed_reason is not None:
            return
        self._closed_reason = reason
        self._arrived.set()
        if self._on_closed is not None:
            self._on_closed(reason)


class MemoryLink:
    """A `Link` to an owner in the same process; messages are handed over, not encoded."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._other: MemoryLink | None = None
        self._on_message: OnMessage | None = None
        self._on_closed: OnClosed | None = None
        self._early: deque[msgspec.Struct] = deque()  # sent before the other side started
        self._is_closed = False

    @classmethod
    def pair(cls, loop: asyncio.AbstractEventLoop) -> tuple["MemoryLink", "MemoryLink"]:
        a, b = cls(loop), cls(loop)
        a._other, b._other = b, a
        return a, b

    def start(self, kind: Any, on_message: OnMessage, on_closed: OnClosed) -> None:
        self._on_message, self._on_closed = on_message, on_closed
        while self._early:
            on_message(self._early.popleft())
        if self._is_closed:
            on_closed("connection closed")

    def send(self, message: msgspec.Struct) -> None:
        if not self._is_closed and self._other is not None:
            self._loop.call_soon(self._other._receive, message)

    def send_frame(self, data: bytes, message: msgspec.Struct) -> None:
        self.send(message)

    async def flush(self) -> None:
        await asyncio.sleep(0)

    def close(self) -> None:
        self._on_closed = None
        self._is_closed = True
        if self._other is not None and not self._other._is_closed:
            self._loop.call_soon(self._other._end)

    def _receive(self, message: msgspec.Struct) -> None:
        if self._is_closed:
            return
        if self._on_message is not None:
            self._on_message(message)
        else:
            self._early.append(message)

    def _end(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._on_closed is not None:
                self._on_closed("connection closed")
