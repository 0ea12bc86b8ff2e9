"""Addresses of this host, and which of them other hosts can use. Linux; nothing is ever sent."""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

LOOPBACK: Final = "127.0.0.1"
ELSEWHERE: Final = ("198.51.100.1", "2001:db8::1")
"""Addresses that no host has (RFC 5737, RFC 3849): the way to them is the default route."""
DISCARD_PORT: Final = 9

SIOCGIFCONF: Final = 0x8912
SIOCGIFFLAGS: Final = 0x8913
"""ioctl(2) that list IPv4 addresses with their interfaces, and an interface's flags
(netdevice(7))."""
IFF_UP_AND_RUNNING: Final = 0x1 | 0x40
IFREQ_BYTES: Final = 40
"""struct ifreq of 64-bit Linux: a name, then a union that begins with what was asked for."""
NAME_BYTES: Final = 16
MAX_IFREQS: Final = 4096
IPV6_TABLE: Final = Path("/proc/thread-self/net/if_inet6")


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of a network interface; an interface may have several."""

    name: str
    address: str
    is_up: bool

    @property
    def is_reachable(self) -> bool:
        """Other hosts may reach it: up, and neither loopback nor bound to a link."""
        parsed = ipaddress.ip_address(self.address)
        return self.is_up and not (parsed.is_loopback or parsed.is_link_local)

    def __str__(self) -> str:
        return f"{self.name} {self.address}{'' if self.is_up else ' (down)'}"


def list_interfaces() -> list[Interface]:
    """Every address of this host, IPv4 first."""
    return [*_ipv4_interfaces(), *_ipv6_interfaces()]


def _ipv4_interfaces() -> Iterator[Interface]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        room = array.array("B", bytes(MAX_IFREQS * IFREQ_BYTES))
        address, num_bytes = room.buffer_info()
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFCONF, struct.pack("iP", num_bytes, address))
        used, _ = struct.unpack("iP", answer)
        for at in range(0, used, IFREQ_BYTES):
            label = room[at : at + NAME_BYTES].tobytes().rstrip(b"\0").decode()
            name = label.partition(":")[0]  # a label such as eth0:1 is an alias on eth0
            packed = room[at + NAME_BYTES + 4 : at + NAME_BYTES + 8].tobytes()
            yield Interface(name, socket.inet_ntoa(packed), _is_up(probe, name))


def _ipv6_interfaces() -> Iterator[Interface]:
    """From lines of address, index, prefix length, scope, flags and name (proc(5))."""
    if not IPV6_TABLE.exists():  # a kernel without IPv6
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for line in IPV6_TABLE.read_text().splitlines():
            digits, *_, name = line.split()
            address = str(ipaddress.IPv6Address(bytes.fromhex(digits)))
            yield Interface(name, address, _is_up(probe, name))


def _is_up(probe: socket.socket, name: str) -> bool:
    request = struct.pack(f"{NAME_BYTES}s{IFREQ_BYTES - NAME_BYTES}x", name.encode())
    try:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFFLAGS, request)
    except OSError:  # it went away after the list was made
        return False
    flags: int = struct.unpack_from("H", answer, NAME_BYTES)[0]
    return flags & IFF_UP_AND_RUNNING == IFF_UP_AND_RUNNING


def interface_of(address: str) -> str | None:
    """Name of the network interface that carries an address."""
    wanted = ipaddress.ip_address(address)
    return next(
        (
            interface.name
            for interface in list_interfaces()
            if ipaddress.ip_address(interface.address) == wanted
        ),
        None,
    )


def describe_interfaces() -> str:
    return ", ".join(map(str, list_interfaces()))


def resolve(host: str) -> list[str]:
    """Addresses of a host name or of an address itself, IPv4 first.

    Raises ValueError that names a host without any.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host {host!r} does not resolve to an address: {error}") from None
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return [str(entry[4][0]) for entry in found]


def means_loopback(host: str) -> bool:
    """Whether a name or address is loopback on every host (RFC 6761, RFC 1122), unlike the own
    name of a host whose /etc/hosts ties it to a loopback address."""
    if host.partition(".")[0] == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_this_host(host: str) -> bool:
    """Whether a name or address means the host on which this process runs."""
    return any(
        ipaddress.ip_address(address).is_loopback or interface_of(address) is not None
        for address in resolve(host)
    )


def source_address(destination: str) -> str | None:
    """The address from which this host would send to another one; None without a route."""
    family = socket.AF_INET6 if ":" in destination else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((destination, DISCARD_PORT))  # UDP: a route, nothing is sent
            address: str = probe.getsockname()[0]
    except OSError:
        return None
    return address


def address_towards(host: str) -> str:
    """This host's address for whoever meets at `host`: on the interface that routes there.

    Loopback only where `host` means it on every host. On `host` itself, whose own name often
    stands for a loopback address in /etc/hosts, it is `outward_address`. Raises ValueError when
    `host` does not resolve or no interface leads to it.
    """
    if means_loopback(host):
        return LOOPBACK
    addresses = resolve(host)
    for address in addresses:
        source = source_address(address)
        if source is not None and not ipaddress.ip_address(source).is_loopback:
            return source
    if any(ipaddress.ip_address(address).is_loopback for address in addresses):
        return outward_address()
    raise ValueError(
        f"no route to the rendezvous host {host} ({', '.join(addresses)}); this host has "
        f"{describe_interfaces()}"
    )


def outward_address() -> str:
    """This host's address for other hosts in general: on the interface of the default route, else
    on the only one there is. Raises ValueError that lists what there is."""
    for destination in ELSEWHERE:
        source = source_address(destination)
        if source is not None and not ipaddress.ip_address(source).is_loopback:
            return source
    reachable = [interface for interface in list_interfaces() if interface.is_reachable]
    if len({interface.name for interface in reachable}) == 1:
        return reachable[0].address
    raise ValueError(
        "no default route says which address other hosts reach; choose one with --host-ip or "
        f"AIOENGINE_HOST_IP. This host has {describe_interfaces() or 'no address at all'}"
    )
