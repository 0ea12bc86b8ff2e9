"""Which TCP ports a process listens on, read from /proc."""

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"


@dataclass(frozen=True, slots=True, order=True)
class OpenPort:
    host: str
    port: int


def listening_ports(pid: int) -> set[OpenPort]:
    inodes = _socket_inodes(pid)
    ports = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            local, state, inode = fields[1], fields[3], fields[9]
            if state == LISTEN and inode in inodes:
                address, port = local.split(":")
                ports.add(OpenPort(_host(address), int(port, 16)))
    return ports


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:
            continue  # closed meanwhile
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    return inodes


def _host(address: str) -> str:
    """From the kernel's form, words in the order of this machine; a wildcard is this host."""
    words = [int(address[i : i + 8], 16) for i in range(0, len(address), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    host = socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
