"""A server whose every byte a test decides: for clients that must bear what other servers send."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


@dataclass(slots=True)
class Asked:
    """One request, and the way to answer it."""

    number: int
    """Of the POSTs, from 0 on."""
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        """In a segment of its own, as far as a socket has segments."""
        self.writer.write(data)
        await self.writer.drain()
        await asyncio.sleep(0)

    async def send_stream(self, *parts: bytes) -> None:
        """Each part is a chunk of the response."""
        await self.send(STREAM_HEAD)
        for part in parts:
            await self.send(chunk(part))
        await self.send(LAST_CHUNK)

    async def send_json(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        await self.send(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)) + data)

    def close(self) -> None:
        self.writer.transport.abort()


Script = Callable[[Asked], Awaitable[None]]


@dataclass(slots=True)
class ScriptedServer:
    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    num_connections: int = 0


@asynccontextmanager
async def scripted_server(script: Script, model: str = "m") -> AsyncIterator[ScriptedServer]:
    """Answers /v1/models by itself, and each POST by the script."""
    served = ScriptedServer()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.num_connections += 1
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                first, *lines = head.strip().split("\r\n")
                headers = {n.lower(): v for n, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                asked = Asked(
                    len(served.asked), first.split()[1], headers, json.loads(body or "{}"), writer
                )
                if first.startswith("GET"):
                    await asked.send_json(200, {"data": [{"id": model}]})
                else:
                    served.asked.append(asked)
                    await script(asked)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    served.url = "http://{}:{}".format(*server.sockets[0].getsockname())
    try:
        yield served
    finally:
        server.close()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(message: Any) -> bytes:
    return b"data: " + json.dumps(message).encode() + b"\n\n"


def tokens(texts: Iterable[str], finish_reason: str | None = "length") -> list[bytes]:
    """Events of a completion, the last of which says why it ended."""
    choices = [{"index": 0, "text": text, "finish_reason": None} for text in texts]
    choices[-1]["finish_reason"] = finish_reason
    return [event({"choices": [choice]}) for choice in choices]


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return event({"choices": [], "usage": counts})
