"""Control connections over loopback sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec

from aioengine.control.channel import Connection, frame
from aioengine.handshake_messages import Endpoint, HandshakeMessage

HOST = "127.0.0.1"
MAX_FRAME_BYTES = 2**25


@asynccontextmanager
async def connected(
    max_frame_bytes: int = MAX_FRAME_BYTES,
) -> AsyncIterator[tuple[Connection, Connection]]:
    """Both ends of one connection: who dialled, who accepted."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[Connection] = loop.create_future()
    server = await loop.create_server(
        lambda: Connection(max_frame_bytes, accepted.set_result), HOST, 0
    )
    port = server.sockets[0].getsockname()[1]
    _, dialled = await loop.create_connection(lambda: Connection(max_frame_bytes), HOST, port)
    try:
        yield dialled, await accepted
    finally:
        dialled.close()
        (await accepted).close()
        server.close()
        await server.wait_closed()


@dataclass(frozen=True, slots=True)
class RawSide:
    """One side of a connection that can say anything, also what is wrong."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, message: msgspec.Struct) -> None:
        self.writer.write(frame(message))

    async def receive(self) -> HandshakeMessage:
        size = int.from_bytes(await self.reader.readexactly(4), "big")
        body = await self.reader.readexactly(size)
        return msgspec.msgpack.decode(body, type=HandshakeMessage)

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


@asynccontextmanager
async def raw_dial(endpoint: Endpoint) -> AsyncIterator[RawSide]:
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    side = RawSide(reader, writer)
    try:
        yield side
    finally:
        await side.close()
