"""Frames, and how connections and memory links end."""

import asyncio
import logging
import socket
import struct

import msgspec
import pytest
from support.connections import HOST, MAX_FRAME_BYTES, connected, raw_dial
from support.mailbox import Mailbox, settle

from aioengine.control import channel
from aioengine.control.channel import Connection, MemoryLink, frame
from aioengine.handshake_messages import Endpoint
from aioengine.messages import Abort, FrontEndCommand, Goodbye, PeerEvent, Shutdown

MESSAGES = [Abort("a"), Abort("é" * 70), Shutdown(), Abort("")]
WIRE = b"".join(map(frame, MESSAGES))
LIMIT = 512


def raw_frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


BAD_FRAMES = {
    "oversized": (LIMIT + 1).to_bytes(4, "big"),
    "largest size": b"\xff\xff\xff\xff",
    "empty": raw_frame(b""),
    "no msgpack": raw_frame(b"\xc1"),
    "cut off": raw_frame(frame(Abort("abc"))[4:-1]),
    "two messages": raw_frame(2 * frame(Abort("a"))[4:]),
    "unknown tag": raw_frame(msgspec.msgpack.encode(["quit"])),
    "message of another union": frame(Goodbye()),
    "wrong type": raw_frame(msgspec.msgpack.encode(["abort", 1])),
    "no UTF-8": raw_frame(b"\x92\xa5abort\xa2\xff\xfe"),
}


# --- frames --------------------------------------------------------------------------------------


async def test_frames_may_be_split_at_every_byte() -> None:
    for cut in range(len(WIRE) + 1):
        connection = Connection(LIMIT)
        inbox = Mailbox(connection, FrontEndCommand)
        connection.data_received(WIRE[:cut])
        connection.data_received(WIRE[cut:])
        assert inbox.messages == MESSAGES


async def test_frames_that_come_byte_by_byte() -> None:
    connection = Connection(LIMIT)
    inbox = Mailbox(connection, FrontEndCommand)
    for i in range(len(WIRE)):
        connection.data_received(WIRE[i : i + 1])
    assert inbox.messages == MESSAGES


async def test_a_frame_of_the_largest_size_is_taken() -> None:
    message = Abort("x" * 300)
    connection = Connection(len(frame(message)) - channel.HEADER_BYTES)
    inbox = Mailbox(connection, FrontEndCommand)
    connection.data_received(frame(message))
    assert (inbox.messages, inbox.closed) == ([message], [])


async def test_large_and_small_frames_keep_their_order_over_a_socket() -> None:
    sent = [Abort(str(i) * size) for i, size in enumerate((1, 3_000_000, 1, 70_000, 1, 1))]
    async with connected() as (dialled, accepted):
        inbox = Mailbox(accepted, FrontEndCommand)
        for message in sent:
            dialled.send(message)
        await inbox.until(lambda: len(inbox.messages) == len(sent))
        assert inbox.messages == sent


@pytest.mark.parametrize("bad", BAD_FRAMES.values(), ids=BAD_FRAMES)
async def test_a_bad_frame_ends_the_connection(
    bad: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(LIMIT) as (dialled, accepted):
        inbox, far_inbox = Mailbox(accepted, FrontEndCommand), Mailbox(dialled, FrontEndCommand)
        dialled.send_frame(frame(Abort("good")) + bad, Abort("good"))
        reason = await inbox.until_closed()
        await far_inbox.until_closed()
        await settle()
        assert inbox.messages == [Abort("good")]
        assert inbox.closed == [reason]
        assert far_inbox.messages == []
    lines = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 1
    assert reason in lines[0].getMessage()
    assert accepted.peer in lines[0].getMessage()


async def test_a_handler_that_raises_ends_the_connection_not_the_loop() -> None:
    """The owner hears of it: otherwise it would wait for an answer that cannot come."""
    raised = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    async with connected() as (dialled, accepted):
        accepted.start(FrontEndCommand, lambda message: 1 / 0, closed.set_result)
        dialled.send(Shutdown())
        assert "division by zero" in await closed
    assert raised


# --- before start --------------------------------------------------------------------------------


async def test_messages_before_start_are_kept() -> None:
    async with connected() as (dialled, accepted):
        for message in (Abort("for the handshake"), *MESSAGES[:3]):
            dialled.send(message)
        await accepted.receive()
        inbox = Mailbox(accepted, FrontEndCommand)
        dialled.send(MESSAGES[3])
        await inbox.until(lambda: len(inbox.messages) == len(MESSAGES))
        assert inbox.messages == MESSAGES


async def test_start_after_the_end_delivers_first_and_closes_then() -> None:
    connection = Connection(LIMIT)
    connection.data_received(WIRE)
    connection.connection_lost(None)
    inbox = Mailbox(connection, FrontEndCommand)
    assert inbox.messages == MESSAGES
    assert inbox.closed == ["connection closed"]


# --- flush and back-pressure ---------------------------------------------------------------------


async def test_flush_waits_for_a_reader_that_is_slow() -> None:
    async with connected() as (dialled, accepted):
        await dialled.flush()  # nothing to wait for
        inbox = Mailbox(accepted, FrontEndCommand)
        transport = accepted._transport
        assert transport is not None
        transport.pause_reading()
        large = Abort("x" * (MAX_FRAME_BYTES - 100))
        dialled.send(large)
        dialled.send(Shutdown())
        async with asyncio.TaskGroup() as tasks:
            flushing = tasks.create_task(dialled.flush())
            await settle()
            assert not flushing.done()
            transport.resume_reading()
        await inbox.until(lambda: inbox.messages == [large, Shutdown()])


async def test_flush_returns_when_the_connection_is_lost() -> None:
    async with connected() as (dialled, accepted):
        transport = accepted._transport
        assert transport is not None
        transport.pause_reading()
        dialled.send(Abort("x" * (MAX_FRAME_BYTES - 100)))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(dialled.flush())
            await settle()
            accepted.abort()


async def test_who_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MAX_UNREAD_BYTES", 2**16)
    async with connected() as (dialled, accepted):
        inbox = Mailbox(dialled, FrontEndCommand)
        transport = accepted._transport
        assert transport is not None
        transport.pause_reading()
        message = Abort("x" * 2**20)
        data = frame(message)
        for _ in range(64):
            dialled.send_frame(data, message)
        assert len(inbox.closed) == 1
        assert "does not read" in inbox.closed[0]


# --- the end -------------------------------------------------------------------------------------


async def test_close_delivers_what_was_sent_and_is_told_to_the_other_side_only() -> None:
    async with connected() as (dialled, accepted):
        near, far = Mailbox(dialled, FrontEndCommand), Mailbox(accepted, FrontEndCommand)
        message = Abort("x" * 5_000_000)
        dialled.send(message)
        dialled.close()
        dialled.close()
        dialled.send(Abort("too late"))
        assert await far.until_closed() == "connection closed"
        await settle()
        assert far.messages == [message]
        assert len(far.closed) == 1
        assert near.closed == []


async def test_a_killed_process_counts_as_closed() -> None:
    """Its kernel sends a reset when unread data were left."""
    async with connected() as (dialled, accepted):
        inbox = Mailbox(accepted, FrontEndCommand)
        assert dialled._transport is not None
        sock = dialled._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        dialled._transport.abort()
        assert (await inbox.until_closed()).startswith("connection closed")
        accepted.send(Shutdown())  # harmless
        await accepted.flush()


async def test_what_came_before_the_end_is_delivered_though_a_write_fails_first() -> None:
    """A process that says Shutdown and leaves without reading the rest resets the connection."""
    loop = asyncio.get_running_loop()
    with socket.create_server((HOST, 0)) as server:
        _, connection = await loop.create_connection(
            lambda: Connection(MAX_FRAME_BYTES), *server.getsockname()
        )
        inbox = Mailbox(connection, FrontEndCommand)
        other, _ = server.accept()
        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        other.sendall(WIRE)
        other.close()
        connection.send(Shutdown())  # fails before the loop reads
        assert (await inbox.until_closed()).startswith("connection closed")
        assert inbox.messages == MESSAGES


async def test_receive_raises_when_the_other_side_closes() -> None:
    async with connected() as (dialled, accepted), asyncio.TaskGroup() as tasks:
        receiving = tasks.create_task(accepted.receive())
        dialled.send(Shutdown())
        assert await receiving == frame(Shutdown())[channel.HEADER_BYTES :]
        dialled.close()
        with pytest.raises(ConnectionError, match="connection closed"):
            await accepted.receive()


async def test_nagle_is_off_on_both_sides() -> None:
    async with connected() as ends:
        for end in ends:
            assert end._transport is not None
            sock = end._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# --- memory links --------------------------------------------------------------------------------


def memory_pair() -> tuple[MemoryLink, MemoryLink]:
    return MemoryLink.pair(asyncio.get_running_loop())


async def test_memory_links_keep_order_and_what_came_before_start() -> None:
    a, b = memory_pair()
    for message in MESSAGES[:2]:
        a.send(message)
    await a.flush()
    inbox = Mailbox(b, FrontEndCommand)
    for message in MESSAGES[2:]:
        a.send_frame(frame(message), message)
    a.close()
    assert await inbox.until_closed() == "connection closed"
    assert inbox.messages == MESSAGES
    b.send(Shutdown())  # harmless


async def test_memory_links_tell_the_other_side_of_the_end_once() -> None:
    a, b = memory_pair()
    near, far = Mailbox(a, FrontEndCommand), Mailbox(b, PeerEvent)
    a.close()
    a.close()
    a.send(Shutdown())
    await far.until_closed()
    b.close()
    await settle()
    assert (near.closed, len(far.closed), far.messages) == ([], 1, [])


async def test_a_memory_link_that_ended_before_start_says_so() -> None:
    a, b = memory_pair()
    a.send(Shutdown())
    a.close()
    await settle()
    inbox = Mailbox(b, FrontEndCommand)
    assert (inbox.messages, len(inbox.closed)) == ([Shutdown()], 1)


async def test_raw_bytes_in_any_segments() -> None:
    """The same over a real socket, one segment per byte as far as the kernel allows."""
    loop = asyncio.get_running_loop()
    accepted: asyncio.Future[Connection] = loop.create_future()
    server = await loop.create_server(lambda: Connection(LIMIT, accepted.set_result), "127.0.0.1")
    endpoint = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    async with raw_dial(endpoint) as side:
        inbox = Mailbox(await accepted, FrontEndCommand)
        for i in range(len(WIRE)):
            side.writer.write(WIRE[i : i + 1])
            await asyncio.sleep(0)
        await inbox.until(lambda: inbox.messages == MESSAGES)
    await inbox.until_closed()
    server.close()
    await server.wait_closed()
