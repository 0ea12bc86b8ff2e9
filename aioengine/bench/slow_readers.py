"""Clients beside a load that ask for many events, and read them slowly, or as they come."""

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aioengine.bench.client import Target
from aioengine.bench.load import Server, Workload, make_jobs
from aioengine.errors import EngineError

NUM_CHOICES: Final = 16
"""Of each answer, so that more comes than sockets hold."""
BUFFER_BYTES: Final = 4096
"""SO_RCVBUF of a slow reader, and of its own buffer."""
SIP_BYTES: Final = 16
SIP_PAUSE_S: Final = 0.25


@asynccontextmanager
async def reading_beside(
    server: Server, work: Workload, num_readers: int, round_name: str, *, slowly: bool
) -> AsyncIterator[None]:
    """Each asks once, and hangs up at the end. Raises EngineError when one is not served."""
    long = dataclasses.replace(work, is_streamed=True, fields={**work.fields, "n": NUM_CHOICES})
    jobs = make_jobs(server, long, num_readers, f"readers {round_name}", 0)
    client, buffer_bytes = server.client, BUFFER_BYTES if slowly else None
    with contextlib.ExitStack() as connections:
        readers = []
        for job in jobs:
            try:
                async with asyncio.timeout(client.timeout_s):
                    reader, writer = await _ask(client.target, job.payload, buffer_bytes)
            except TimeoutError:
                waited = f"no answer to a slow reader within {client.timeout_s:g} s"
                raise EngineError(f"{client.target.url}: {waited}") from None
            connections.callback(writer.transport.abort)
            readers.append(reader)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(_read(reader, slowly)) for reader in readers]
            yield
            for task in running:
                task.cancel()


async def _ask(
    target: Target, payload: bytes, buffer_bytes: int | None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    loop = asyncio.get_running_loop()
    tls = ssl.create_default_context() if target.is_tls else None
    try:
        (family, kind, proto, _, address), *_ = await loop.getaddrinfo(
            target.host, target.port, type=socket.SOCK_STREAM
        )
        sock = socket.socket(family, kind, proto)
        sock.setblocking(False)
        if buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        await loop.sock_connect(sock, address)
        reader, writer = await asyncio.open_connection(
            sock=sock,
            limit=buffer_bytes or 2**16,
            ssl=tls,
            server_hostname=target.host if tls else None,
        )
        writer.write(payload)
        status = await reader.readline()
    except OSError as error:
        raise EngineError(f"{target.url}: a slow reader has no connection: {error}") from None
    if b" 200 " not in status:
        writer.transport.abort()
        raise EngineError(f"{target.url}: a slow reader got {status.decode(errors='replace')!r}")
    return reader, writer


async def _read(reader: asyncio.StreamReader, slowly: bool) -> None:
    with contextlib.suppress(ConnectionError):  # a server may hang up on who reads so slowly
        while await reader.read(SIP_BYTES if slowly else 2**16):
            if slowly:
                await asyncio.sleep(SIP_PAUSE_S)
