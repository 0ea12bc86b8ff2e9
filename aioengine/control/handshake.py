"""Mutual proof, on every control connection, that both ends belong to this attempt of the launch.

    dialler                               acceptor
    Hello(rank, role, nonce_d)    ──►
                                  ◄──     Challenge(nonce_a, HMAC(key, "accept", …))
    Proof(HMAC(key, "dial", …))   ──►
                                  ◄──     Welcome | Refused

Both MACs (HMAC-SHA256, RFC 2104) cover both nonces, the rank and the role, so none can be replayed
or reflected. The key mixes the job's secret with the id of the attempt.
"""

import asyncio
import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Callable, Iterable

import msgspec

from aioengine.control.channel import Connection
from aioengine.errors import HandshakeError, StartupError
from aioengine.handshake_messages import (
    Challenge,
    Endpoint,
    HandshakeMessage,
    Hello,
    Proof,
    Refused,
    Role,
    Welcome,
)
from aioengine.limits import HANDSHAKE_TIMEOUT_S, MAX_HANDSHAKE_FRAME_BYTES

log = logging.getLogger(__name__)
decode_handshake = msgspec.msgpack.Decoder(HandshakeMessage).decode
NONCE_BYTES = 32


def attempt_key(secret: bytes, attempt: str) -> bytes:
    return hmac.digest(secret, b"aioengine attempt " + attempt.encode(), hashlib.sha256)


def _mac(key: bytes, side: str, hello: Hello, accept_nonce: bytes) -> bytes:
    text = f"{side} {hello.rank} {hello.role} ".encode()
    return hmac.digest(key, text + hello.nonce + accept_nonce, hashlib.sha256)


async def receive_message(connection: Connection) -> HandshakeMessage:
    """The next handshake message. Raises HandshakeError for anything else."""
    try:
        return decode_handshake(await connection.receive())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandshakeError(f"{connection.peer} sent no handshake message ({error})") from None
    except ConnectionError as error:
        raise HandshakeError(f"{connection.peer}: {error}") from None


async def dial(
    endpoint: Endpoint, rank: int, role: Role, key: bytes, max_frame_bytes: int
) -> Connection:
    """Connect as `rank` in `role`. Raises HandshakeError that names the endpoint."""
    where = f"{endpoint.host}:{endpoint.port}"
    loop = asyncio.get_running_loop()
    hello = Hello(rank=rank, role=role, nonce=secrets.token_bytes(NONCE_BYTES))
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
            _, connection = await loop.create_connection(
                lambda: Connection(MAX_HANDSHAKE_FRAME_BYTES), endpoint.host, endpoint.port
            )
            try:
                await prove(connection, where, hello, key)
            except BaseException:
                connection.close()
                raise
    except TimeoutError:
        raise HandshakeError(f"{where} did not answer in {HANDSHAKE_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise HandshakeError(f"cannot connect to {where}: {error}") from None
    connection.max_frame_bytes = max_frame_bytes
    return connection


async def prove(connection: Connection, where: str, hello: Hello, key: bytes) -> None:
    """The dialling side of the handshake. Raises HandshakeError that names `where`."""
    connection.send(hello)
    answer = await receive_message(connection)
    if isinstance(answer, Challenge):
        if not hmac.compare_digest(answer.proof, _mac(key, "accept", hello, answer.nonce)):
            raise HandshakeError(f"{where} does not belong to this attempt of the launch")
        connection.send(Proof(_mac(key, "dial", hello, answer.nonce)))
        answer = await receive_message(connection)
        if isinstance(answer, Welcome):
            return
    if isinstance(answer, Refused):
        raise HandshakeError(f"{where} refused rank {hello.rank} as {hello.role}: {answer.reason}")
    raise HandshakeError(f"{where} does not belong to this attempt of the launch")


async def verify(connection: Connection, key: bytes) -> Hello:
    """The accepting side of the handshake, up to its Welcome. Raises HandshakeError."""
    hello = await receive_message(connection)
    if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
        raise HandshakeError("expected a hello")
    nonce = secrets.token_bytes(NONCE_BYTES)
    connection.send(Challenge(nonce, _mac(key, "accept", hello, nonce)))
    proof = await receive_message(connection)
    if not isinstance(proof, Proof) or not hmac.compare_digest(
        proof.proof, _mac(key, "dial", hello, nonce)
    ):
        raise HandshakeError(f"wrong proof for rank {hello.rank} as {hello.role}")
    return hello


class ControlPort:
    """A port that takes whoever proves to be of this attempt and is admitted.

    Anything else is dropped with a log line and does no harm. `admit` raises HandshakeError for a
    guest that is not to come in; `on_guest` gets the others. Tasks belong to `tasks`.
    """

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        key: bytes,
        *,
        max_frame_bytes: int,
        admit: Callable[[Hello], None],
        on_guest: Callable[[Hello, Connection], None],
    ) -> None:
        """`max_frame_bytes` is for what guests send once they are in."""
        self._tasks = tasks
        self._key = key
        self._max_frame_bytes = max_frame_bytes
        self._admit = admit
        self._on_guest = on_guest
        self._server: asyncio.Server | None = None
        self._unproven: set[Connection] = set()

    async def open(self, host: str) -> Endpoint:
        """Listen on any free port of `host`. Raises OSError when that is no address here."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._new_connection, host, 0)
        return Endpoint(host, self._server.sockets[0].getsockname()[1])

    async def open_on(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._new_connection, sock=listening)

    def close(self) -> None:
        """Stop listening and end what has not proved itself; guests stay."""
        if self._server is not None:
            self._server.close()
        for connection in self._unproven:
            connection.abort()

    def _new_connection(self) -> Connection:
        return Connection(MAX_HANDSHAKE_FRAME_BYTES, self._on_open)

    def _on_open(self, connection: Connection) -> None:
        self._unproven.add(connection)
        self._tasks.create_task(self._accept(connection), name=f"handshake {connection.peer}")

    async def _accept(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                hello = await verify(connection, self._key)
            self._admit(hello)
        except (HandshakeError, TimeoutError) as error:
            reason = str(error) or f"no handshake within {HANDSHAKE_TIMEOUT_S:g} s"
            log.warning("dropped a control connection from %s: %s", connection.peer, reason)
            connection.send(Refused(reason))
            connection.close()
            return
        finally:
            self._unproven.discard(connection)
        connection.max_frame_bytes = self._max_frame_bytes
        connection.send(Welcome())
        self._on_guest(hello, connection)


class Listener:
    """The control port of rank 0 or of a leader: accepts each expected (role, rank) once."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        key: bytes,
        expected: Iterable[tuple[Role, int]],
        max_frame_bytes: int,
    ) -> None:
        loop = asyncio.get_running_loop()
        self._accepted: dict[tuple[Role, int], asyncio.Future[Connection]] = {
            seat: loop.create_future() for seat in expected
        }
        self._port = ControlPort(
            tasks, key, max_frame_bytes=max_frame_bytes, admit=self._admit, on_guest=self._seat
        )

    async def open(self, host: str) -> Endpoint:
        """Listen on any free port of `host`. Raises StartupError when that is no address here."""
        try:
            endpoint = await self._port.open(host)
        except OSError as error:
            raise StartupError(
                f"cannot listen on {host} for the other ranks ({error}); --host-ip chooses the "
                "address"
            ) from None
        log.info(
            "control port %s:%d expects %d connections", host, endpoint.port, len(self._accepted)
        )
        return endpoint

    async def wait_accepted(self, role: Role, rank: int) -> Connection:
        return await asyncio.shield(self._accepted[role, rank])

    def accepted(self, role: Role) -> list[Connection]:
        """Connections that have come in a role, by rank."""
        return [
            f.result() for (r, _), f in sorted(self._accepted.items()) if r == role and f.done()
        ]

    def missing(self, role: Role) -> list[int]:
        """Ranks that are expected in a role and have not come."""
        return sorted(
            rank for (r, rank), future in self._accepted.items() if r == role and not future.done()
        )

    def close(self) -> None:
        """Stop listening and end what has not proved itself; accepted connections stay."""
        self._port.close()

    def _admit(self, hello: Hello) -> None:
        seat = self._accepted.get((hello.role, hello.rank))
        if seat is None or seat.done():
            known = "is here already" if seat is not None else "is not expected"
            raise HandshakeError(f"rank {hello.rank} as {hello.role} {known}")

    def _seat(self, hello: Hello, connection: Connection) -> None:
        self._accepted[hello.role, hello.rank].set_result(connection)
