"""Who may connect to a control port, and what becomes of everyone else."""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from support.connections import HOST, MAX_FRAME_BYTES, RawSide, raw_dial
from support.mailbox import settle

from aioengine.control import handshake
from aioengine.control.channel import Connection, frame
from aioengine.control.handshake import Listener, attempt_key, dial
from aioengine.errors import HandshakeError
from aioengine.handshake_messages import Challenge, Endpoint, Hello, Proof, Refused, Role, Welcome
from aioengine.limits import MAX_HANDSHAKE_FRAME_BYTES
from aioengine.messages import Shutdown

KEY = attempt_key(b"secret", "attempt 1")
OTHER_KEYS = [
    attempt_key(b"another secret", "attempt 1"),
    attempt_key(b"secret", "attempt 0"),
    b"",
]
NONCE = b"n" * handshake.NONCE_BYTES
SEAT = ("peer", 1)


@asynccontextmanager
async def listening(*seats: tuple[Role, int]) -> AsyncIterator[tuple[Listener, Endpoint]]:
    """A listener, closed with all that it accepted."""
    async with asyncio.TaskGroup() as tasks:
        listener = Listener(tasks, KEY, seats or [SEAT], MAX_FRAME_BYTES)
        endpoint = await listener.open(HOST)
        try:
            yield listener, endpoint
        finally:
            listener.close()
            for role in ("member", "peer", "front_end"):
                for connection in listener.accepted(role):
                    connection.close()


async def dial_seat(endpoint: Endpoint, key: bytes = KEY) -> Connection:
    return await dial(endpoint, 1, "peer", key, MAX_FRAME_BYTES)


def proof(hello: Hello, challenge: Challenge, key: bytes = KEY, side: str = "dial") -> Proof:
    return Proof(handshake._mac(key, side, hello, challenge.nonce))


async def challenge_for(side: RawSide, hello: Hello) -> Challenge:
    side.send(hello)
    challenge = await side.receive()
    assert isinstance(challenge, Challenge)
    return challenge


# --- the right ones ------------------------------------------------------------------------------


async def test_both_ends_know_the_secret() -> None:
    async with listening() as (listener, endpoint):
        assert listener.missing("peer") == [1]
        assert listener.accepted("peer") == []
        connection = await dial_seat(endpoint)
        accepted = await listener.wait_accepted("peer", 1)
        assert listener.missing("peer") == []
        assert listener.accepted("peer") == [accepted]
        assert connection.max_frame_bytes == accepted.max_frame_bytes == MAX_FRAME_BYTES
        body = frame(Shutdown())[4:]
        for one, other in ((connection, accepted), (accepted, connection)):
            one.send(Shutdown())
            assert await other.receive() == body
        connection.close()


async def test_seats_are_told_apart_by_rank_and_role() -> None:
    seats: list[tuple[Role, int]] = [("member", 1), ("peer", 1), ("peer", 2), ("front_end", 0)]
    async with listening(*seats) as (listener, endpoint):
        dialled = {}
        for role, rank in reversed(seats):
            dialled[role, rank] = await dial(endpoint, rank, role, KEY, MAX_FRAME_BYTES)
        for seat in seats:
            accepted = await listener.wait_accepted(*seat)
            dialled[seat].send(Hello(rank=seat[1], role=seat[0], nonce=b""))
            assert (
                await accepted.receive() == frame(Hello(rank=seat[1], role=seat[0], nonce=b""))[4:]
            )
        for connection in dialled.values():
            connection.close()


async def test_a_listener_goes_on_waiting_when_a_waiter_gives_up() -> None:
    async with listening() as (listener, endpoint):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await listener.wait_accepted("peer", 1)
        connection = await dial_seat(endpoint)
        await listener.wait_accepted("peer", 1)
        connection.close()


# --- impostors that dial -------------------------------------------------------------------------


async def say_wrong_proof(side: RawSide, endpoint: Endpoint) -> None:
    hello = Hello(rank=1, role="peer", nonce=NONCE)
    side.send(proof(hello, await challenge_for(side, hello), OTHER_KEYS[0]))


async def say_random_proof(side: RawSide, endpoint: Endpoint) -> None:
    await challenge_for(side, Hello(rank=1, role="peer", nonce=NONCE))
    side.send(Proof(secrets.token_bytes(32)))


async def say_empty_proof(side: RawSide, endpoint: Endpoint) -> None:
    await challenge_for(side, Hello(rank=1, role="peer", nonce=NONCE))
    side.send(Proof(b""))


async def replay_a_proof(side: RawSide, endpoint: Endpoint) -> None:
    """A right proof, and the hello before it, seen on another connection."""
    hello = Hello(rank=1, role="peer", nonce=NONCE)
    async with raw_dial(endpoint) as seen:
        right = proof(hello, await challenge_for(seen, hello))
    await challenge_for(side, hello)
    side.send(right)


async def reflect_the_challenge(side: RawSide, endpoint: Endpoint) -> None:
    """The acceptor's own proof, which covers the same nonces."""
    challenge = await challenge_for(side, Hello(rank=1, role="peer", nonce=NONCE))
    side.send(Proof(challenge.proof))


async def prove_another_rank(side: RawSide, endpoint: Endpoint) -> None:
    challenge = await challenge_for(side, Hello(rank=1, role="peer", nonce=NONCE))
    side.send(proof(Hello(rank=2, role="peer", nonce=NONCE), challenge))


async def prove_another_role(side: RawSide, endpoint: Endpoint) -> None:
    challenge = await challenge_for(side, Hello(rank=1, role="peer", nonce=NONCE))
    side.send(proof(Hello(rank=1, role="member", nonce=NONCE), challenge))


async def be_a_rank_nobody_expects(side: RawSide, endpoint: Endpoint) -> None:
    hello = Hello(rank=7, role="peer", nonce=NONCE)
    side.send(proof(hello, await challenge_for(side, hello)))


async def be_in_a_role_nobody_expects(side: RawSide, endpoint: Endpoint) -> None:
    hello = Hello(rank=1, role="front_end", nonce=NONCE)
    side.send(proof(hello, await challenge_for(side, hello)))


async def send_a_short_nonce(side: RawSide, endpoint: Endpoint) -> None:
    side.send(Hello(rank=1, role="peer", nonce=b"n"))


async def prove_before_hello(side: RawSide, endpoint: Endpoint) -> None:
    side.send(Proof(secrets.token_bytes(32)))


async def speak_http(side: RawSide, endpoint: Endpoint) -> None:
    side.writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


async def send_junk_in_a_frame(side: RawSide, endpoint: Endpoint) -> None:
    side.writer.write((32).to_bytes(4, "big") + secrets.token_bytes(32))


async def send_deep_nesting(side: RawSide, endpoint: Endpoint) -> None:
    side.writer.write((60_000).to_bytes(4, "big") + b"\x91" * 60_000)


async def send_an_oversized_frame(side: RawSide, endpoint: Endpoint) -> None:
    side.writer.write((MAX_HANDSHAKE_FRAME_BYTES + 1).to_bytes(4, "big"))


async def hang_up_at_once(side: RawSide, endpoint: Endpoint) -> None:
    side.writer.close()


async def hang_up_after_hello(side: RawSide, endpoint: Endpoint) -> None:
    await challenge_for(side, Hello(rank=1, role="peer", nonce=NONCE))
    side.writer.close()


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (say_wrong_proof, "wrong proof for rank 1 as peer"),
        (say_random_proof, "wrong proof"),
        (say_empty_proof, "wrong proof"),
        (replay_a_proof, "wrong proof"),
        (reflect_the_challenge, "wrong proof"),
        (prove_another_rank, "wrong proof"),
        (prove_another_role, "wrong proof"),
        (be_a_rank_nobody_expects, "rank 7 as peer is not expected"),
        (be_in_a_role_nobody_expects, "rank 1 as front_end is not expected"),
        (send_a_short_nonce, "expected a hello"),
        (prove_before_hello, "expected a hello"),
        (speak_http, f"the limit is {MAX_HANDSHAKE_FRAME_BYTES}"),
        (send_junk_in_a_frame, "sent no handshake message"),
        (send_deep_nesting, "sent no handshake message"),
        (send_an_oversized_frame, f"the limit is {MAX_HANDSHAKE_FRAME_BYTES}"),
        (hang_up_at_once, "connection closed"),
        (hang_up_after_hello, "connection closed"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_an_impostor_is_dropped_and_the_right_one_still_comes(
    behave: Callable[[RawSide, Endpoint], Awaitable[None]],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening() as (listener, endpoint), raw_dial(endpoint) as side:
        await behave(side, endpoint)
        while await side.reader.read(2**16):
            pass  # the listener closes the connection
        assert listener.missing("peer") == [1]
        connection = await dial_seat(endpoint)
        await listener.wait_accepted("peer", 1)
        connection.close()
    dropped = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert any("dropped a control connection" in line and reason in line for line in dropped)


@pytest.mark.parametrize("key", OTHER_KEYS)
async def test_a_dialler_without_the_secret_finds_out_first(key: bytes) -> None:
    async with listening() as (listener, endpoint):
        with pytest.raises(HandshakeError, match="does not belong to this attempt"):
            await dial_seat(endpoint, key)
        assert listener.missing("peer") == [1]


async def test_a_seat_is_taken_once(caplog: pytest.LogCaptureFixture) -> None:
    async with listening() as (listener, endpoint):
        first = await dial_seat(endpoint)
        with pytest.raises(HandshakeError, match="rank 1 as peer is here already"):
            await dial_seat(endpoint)
        accepted = await listener.wait_accepted("peer", 1)
        first.send(Shutdown())
        assert await accepted.receive() == frame(Shutdown())[4:]
        first.close()
    assert "is here already" in caplog.text


async def test_of_two_at_the_same_time_one_gets_the_seat() -> None:
    async with (
        listening() as (listener, endpoint),
        raw_dial(endpoint) as a,
        raw_dial(endpoint) as b,
    ):
        hello = Hello(rank=1, role="peer", nonce=NONCE)
        proofs = [proof(hello, await challenge_for(side, hello)) for side in (a, b)]
        for side, right in zip((a, b), proofs, strict=True):
            side.send(right)
        answers = {type(await side.receive()) for side in (a, b)}
        assert answers == {Welcome, Refused}
        assert len(listener.accepted("peer")) == 1


async def test_who_is_silent_is_dropped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening() as (listener, endpoint):
        monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.05)
        async with raw_dial(endpoint) as silent, raw_dial(endpoint) as stuck:
            await challenge_for(stuck, Hello(rank=1, role="peer", nonce=NONCE))
            for side in (silent, stuck):
                assert await side.receive() == Refused("no handshake within 0.05 s")
                assert await side.reader.read() == b""
        monkeypatch.undo()
        connection = await dial_seat(endpoint)
        await listener.wait_accepted("peer", 1)
        connection.close()
    assert caplog.text.count("no handshake within 0.05 s") == 2


async def test_close_ends_unproven_connections_and_keeps_accepted_ones() -> None:
    async with listening(SEAT, ("peer", 2)) as (listener, endpoint):
        connection = await dial_seat(endpoint)
        accepted = await listener.wait_accepted("peer", 1)
        async with raw_dial(endpoint) as silent, raw_dial(endpoint) as stuck:
            await challenge_for(stuck, Hello(rank=2, role="peer", nonce=NONCE))
            listener.close()
            for side in (silent, stuck):
                with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
                    await side.receive()
        with pytest.raises(HandshakeError, match="cannot connect"):
            await dial(endpoint, 2, "peer", KEY, MAX_FRAME_BYTES)
        accepted.send(Shutdown())
        assert await connection.receive() == frame(Shutdown())[4:]
        connection.close()


# --- impostors that listen -----------------------------------------------------------------------


@asynccontextmanager
async def impostor(behave: Callable[[RawSide], Awaitable[None]]) -> AsyncIterator[Endpoint]:
    """A server that is no listener of ours. It does not hang up before the test is over."""
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        side = RawSide(reader, writer)
        await behave(side)
        await is_over.wait()
        await side.close()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield Endpoint(HOST, server.sockets[0].getsockname()[1])
    finally:
        is_over.set()
        server.close()
        await server.wait_closed()
        await settle()


async def say_nothing(side: RawSide) -> None: ...


async def welcome_at_once(side: RawSide) -> None:
    side.send(Welcome())


async def challenge_with(side: RawSide, key: bytes, role: str) -> None:
    hello = await side.receive()
    assert isinstance(hello, Hello)
    side.send(Challenge(NONCE, proof(hello, Challenge(NONCE, b""), key, role).proof))


async def challenge_without_the_secret(side: RawSide) -> None:
    await challenge_with(side, OTHER_KEYS[0], "accept")


async def challenge_with_a_diallers_proof(side: RawSide) -> None:
    """As if another dialler's proof were reflected."""
    await challenge_with(side, KEY, "dial")


async def refuse(side: RawSide) -> None:
    await side.receive()
    side.send(Refused("not you"))


async def refuse_after_proof(side: RawSide) -> None:
    await challenge_with(side, KEY, "accept")
    await side.receive()
    side.send(Refused("not you either"))


async def answer_junk(side: RawSide) -> None:
    side.writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


async def answer_deep_nesting(side: RawSide) -> None:
    side.writer.write((60_000).to_bytes(4, "big") + b"\x91" * 60_000)


async def hang_up(side: RawSide) -> None:
    await side.receive()
    await side.close()


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (say_nothing, r"did not answer in 0\.2 s"),
        (welcome_at_once, "does not belong to this attempt"),
        (challenge_without_the_secret, "does not belong to this attempt"),
        (challenge_with_a_diallers_proof, "does not belong to this attempt"),
        (refuse, "refused rank 1 as peer: not you"),
        (refuse_after_proof, "refused rank 1 as peer: not you either"),
        (answer_junk, "frame of"),
        (answer_deep_nesting, "no handshake message"),
        (hang_up, "connection closed"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
async def test_a_dialler_says_what_was_wrong_with_the_other_side(
    behave: Callable[[RawSide], Awaitable[None]], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "HANDSHAKE_TIMEOUT_S", 0.2)
    async with impostor(behave) as endpoint:
        with pytest.raises(HandshakeError, match=reason) as caught:
            await dial_seat(endpoint)
        assert str(endpoint.port) in str(caught.value)
