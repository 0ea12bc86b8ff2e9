"""The HTTP/1.1 client of `aioengine bench serve`: notes when bytes came, and little else.

While a stream runs, each read costs one clock, the C parser, and two appends; events are counted
and looked at when the request is over (`bench_events.py`). So one core follows far more events
than a server on the same machine can send, and it is the server that is measured.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from aioengine.errors import EngineError


class RequestError(EngineError):
    """A request got no complete answer; the text says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, as `--url` names it."""

    url: str
    """As typed, without /v1 and slashes at its end."""
    host: str
    port: int
    path: str
    """What stands before /v1."""
    is_tls: bool
    api_key: str | None

    @classmethod
    def parse(cls, flag: str, url: str, api_key: str | None) -> Self:
        """Raises ValueError that names the flag."""
        short = url.rstrip("/").removesuffix("/v1").rstrip("/")
        parts = urlsplit(short)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise ValueError(f"{flag}: expected a URL such as http://127.0.0.1:8000, got {url!r}")
        is_tls = parts.scheme == "https"
        port = port or (443 if is_tls else 80)
        return cls(short, parts.hostname, port, parts.path, is_tls, api_key)

    def head(self, method: str, route: str) -> bytes:
        """Request line and headers, but for Content-Length and the blank line."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.path}{route} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines.append("Content-Type: application/json")
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "".join(f"{line}\r\n" for line in lines).encode()


@dataclass(slots=True, eq=False)
class Answer:
    """One response: what came when. Times are `time.perf_counter()`."""

    sent_s: float = 0.0
    status: int = 0
    """0: not even headers came."""
    is_event_stream: bool = False
    body: bytearray = field(default_factory=bytearray)
    read_s: list[float] = field(default_factory=list)
    """When each part of the body came, and how long the body was then."""
    lengths: list[int] = field(default_factory=list)
    end_s: float = 0.0
    broken: str = ""
    """Why the response has no end of its own."""


class Connection(asyncio.Protocol):
    """One connection, on which one request at a time is answered."""

    def __init__(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport
        self._answer: Answer | None = None
        self._over: asyncio.Future[None]
        self._now = 0.0
        self._ends_by_closing = True
        self.is_reusable = True
        self.is_lost = False

    async def exchange(self, payload: bytes) -> Answer:
        """Send a request; its answer, whole or broken. Cancelled: the connection is closed."""
        self._over = asyncio.get_running_loop().create_future()
        answer = self._answer = Answer()
        answer.sent_s = time.perf_counter()
        self._transport.write(payload)
        try:
            await self._over
        finally:
            self._answer = None
            if self._over.cancelled() or not self.is_reusable:
                self.close()
        return answer

    def close(self) -> None:
        self.is_reusable = False
        self._transport.abort()

    def _end(self, broken: str = "") -> None:
        if self._answer is not None and not self._over.done():
            self._answer.end_s = time.perf_counter()
            self._answer.broken = broken
            self._over.set_result(None)

    # --- what the loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.is_reusable = False
            self._end(f"what came is no HTTP: {error}")
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        self.is_reusable = False
        answer = self._answer
        if answer is not None and answer.status and self._ends_by_closing and exc is None:
            self._end()
        else:
            reason = f" ({exc})" if exc else ""
            self._end(f"the server closed the connection{reason}")

    # --- what the parser calls

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"content-type" if self._answer is not None:
                self._answer.is_event_stream = value.startswith(b"text/event-stream")
            case b"content-length" | b"transfer-encoding":
                self._ends_by_closing = False

    def on_headers_complete(self) -> None:
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        answer = self._answer
        if answer is not None:
            answer.body += data
            answer.read_s.append(self._now)
            answer.lengths.append(len(answer.body))

    def on_message_complete(self) -> None:
        self.is_reusable = self._parser.should_keep_alive() and not self.is_lost
        self._ends_by_closing = True
        self._end()


class Client:
    """Owns the connections to one server; they are kept alive between requests."""

    def __init__(self, target: Target, timeout_s: float) -> None:
        """`timeout_s` is for each whole request."""
        self.target = target
        self.timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if target.is_tls else None

    async def get(self, route: str) -> Answer:
        return await self.exchange(self.target.head("GET", route) + b"\r\n")

    def post_payload(self, route: str, body: bytes) -> bytes:
        """A request ready to be sent, so that no time is spent on it later."""
        head = self.target.head("POST", route)
        return b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)

    async def exchange(self, payload: bytes) -> Answer:
        """The answer, whole or broken. Raises RequestError when there was no connection."""
        answer = Answer()
        try:
            async with asyncio.timeout(self.timeout_s):
                while connection := self._pop_idle():
                    answer = await self._exchange_on(connection, payload)
                    if answer.status or not answer.broken:
                        return answer
                    # The server closed an idle connection just then, as it may.
                return await self._exchange_on(await self._connect(), payload)
        except TimeoutError:
            raise RequestError(f"no complete answer within {self.timeout_s:g} s") from None

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def _exchange_on(self, connection: Connection, payload: bytes) -> Answer:
        answer = await connection.exchange(payload)
        if connection.is_reusable:
            self._idle.append(connection)
        return answer

    def _pop_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_lost:
                return connection
        return None

    async def _connect(self) -> Connection:
        target = self.target
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                Connection, target.host, target.port, ssl=self._tls
            )
        except OSError as error:
            raise RequestError(f"no connection: {error.strerror or error}") from None
        return connection
