"""Connections that do not belong to a launch, and a tap on one that does."""

import socket
import struct
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

import msgspec
from torch.distributed import TCPStore

from aioengine.control.bootstrap import Answer
from aioengine.control.channel import frame
from aioengine.handshake_messages import Endpoint, Hello, Proof, Welcome
from aioengine.messages import Shutdown

LIMIT_S = 30.0
HELLO = Hello(rank=1, role="member", nonce=b"n" * 32)


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


JUNK: Final = {
    "4 GiB": b"\xff\xff\xff\xff" + bytes(1000),
    "4 GiB after a hello": frame(HELLO) + b"\xff\xff\xff\xff",
    "largest frame": (2**16).to_bytes(4, "big") + bytes(2**16),
    "no msgpack": framed(b"\xc1" * 40),
    "deep": framed(b"\x91" * 60_000),
    "no UTF-8": framed(b"\x81\xa4type\xa2\xff\xfe"),
    "unknown message": framed(msgspec.msgpack.encode({"type": "quit"})),
    "another message": frame(Shutdown()),
    "proof first": frame(Proof(b"p" * 32)),
    "welcome first": frame(Welcome()),
    "short nonce": frame(Hello(rank=1, role="peer", nonce=b"")),
    "forged proof": frame(HELLO) + frame(Proof(b"p" * 32)),
    "hello twice": 2 * frame(HELLO),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "TLS": bytes.fromhex("16030100d2010000ce0303") + bytes(200),
    "zeros": bytes(4096),
    "nothing": b"",
}


def intrude(port: int, data: bytes, *, hang_up: bool = False, reset: bool = False) -> int:
    """Say this and wait for the end of the connection; the port it came from."""
    with socket.create_connection(("127.0.0.1", port), LIMIT_S) as stranger:
        own_port: int = stranger.getsockname()[1]
        stranger.sendall(data)
        if reset:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return own_port
        if hang_up:
            stranger.shutdown(socket.SHUT_WR)
        try:
            while stranger.recv(2**16):
                pass
        except ConnectionResetError:
            pass
    return own_port


def keep_open(port: int, data: bytes) -> socket.socket:
    """Say this and stay."""
    stranger = socket.create_connection(("127.0.0.1", port), LIMIT_S)
    stranger.sendall(data)
    return stranger


class Tap:
    """Stands between one rank and the rank 0 that it finds in the store; records what it says."""

    def __init__(self, theirs: TCPStore, store: TCPStore, rank: int) -> None:
        """`theirs` is the store that the rank was given, `store` the one of all others."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._frames: SimpleQueue[bytes] = SimpleQueue()
        run_in_thread(lambda: self._forward_answer(theirs, store, rank))

    def handshake(self) -> list[bytes]:
        """The frames of the rank: its hello, its proof, its entry."""
        return [self._frames.get(timeout=LIMIT_S) for _ in range(3)]

    def _forward_answer(self, theirs: TCPStore, store: TCPStore, rank: int) -> None:
        fresh = theirs.get(f"aioengine//hello/{rank}").decode()
        store.set(f"aioengine//hello/{rank}", fresh)
        key = f"aioengine//answer/{rank}/{fresh}"
        answer = msgspec.json.decode(store.get(key), type=Answer)
        here = Endpoint("127.0.0.1", self._listener.getsockname()[1])
        tapped = msgspec.structs.replace(answer, endpoint=here)
        theirs.set(key, msgspec.json.encode(tapped).decode())
        with self._listener, self._listener.accept()[0] as near:
            there = (answer.endpoint.host, answer.endpoint.port)
            with socket.create_connection(there) as far:
                run_in_thread(lambda: self._record(near, far))
                while data := far.recv(2**16):
                    near.sendall(data)
                near.shutdown(socket.SHUT_WR)

    def _record(self, near: socket.socket, far: socket.socket) -> None:
        stream = near.makefile("rb")
        while head := stream.read(4):
            said = head + stream.read(int.from_bytes(head, "big"))
            self._frames.put(said)
            far.sendall(said)


def run_in_thread(run: Callable[[], None]) -> None:
    threading.Thread(target=run, daemon=True).start()
