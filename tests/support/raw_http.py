"""A client that sends any bytes, also such as are no HTTP."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def connected(url: str, receive_buffer_bytes: int | None = None) -> AsyncIterator[Streams]:
    """Ends as a client that leaves."""
    parts = urlsplit(url)
    sock = socket.socket()
    if receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (parts.hostname, parts.port))
    limit = 2**16 if receive_buffer_bytes is None else receive_buffer_bytes
    reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    """Status, headers by small name, and a body of known length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status_line, *lines = head.strip().split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        headers[name.lower()] = value
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return int(status_line.split()[1]), headers, body


async def ask(url: str, request: bytes) -> tuple[int, dict[str, str], bytes]:
    async with connected(url) as (reader, writer):
        writer.write(request)
        return await read_answer(reader)


def head(method: str, target: str, **headers: Any) -> bytes:
    """The beginning of a request; `_` in names of headers stands for `-`."""
    lines = [f"{method} {target} HTTP/1.1", f"Host: {headers.pop('host', 'x')}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"
