"""Two "nodes" on one machine: network namespaces joined by a veth pair. Needs root and iproute2."""

import asyncio
import concurrent.futures
import ctypes
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
PREFIX = "aioengine-test"
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/run/netns")
FILES = Path("/etc/netns")
"""`ip netns exec NAME` puts what is in the folder NAME there over the files of /etc."""


@dataclass(frozen=True)
class Node:
    """A network namespace whose /etc/hosts ties its own host name to 127.0.1.1, as Debian does."""

    namespace: str
    host: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What to put before a command so that it runs here."""
        return ["ip", "netns", "exec", self.namespace]

    def call(self, function: Callable[[], T]) -> T:
        """Call in a thread whose sockets are this node's. Files stay those of the machine."""

        def inside() -> T:
            with (NAMESPACES / self.namespace).open() as namespace:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            return function()

        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(inside).result()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in an event loop whose sockets are this node's."""
        return self.call(lambda: asyncio.run(main))


@contextmanager
def two_nodes(*, network: str = "10.77.0.{}/24") -> Iterator[tuple[Node, Node]]:
    """Deletes the nodes whatever happens. Skips the test where none can be made."""
    _sweep()
    key = uuid.uuid4().hex[:6]
    one, two = (
        Node(
            f"{PREFIX}-{os.getpid()}-{key}-{number}",
            f"node{number}",
            network.format(number).partition("/")[0],
        )
        for number in (1, 2)
    )
    with ExitStack() as undo:
        for node, other in ((one, two), (two, one)):
            undo.callback(_delete, node.namespace)
            _add(node.namespace)
            hosts = FILES / node.namespace / "hosts"
            hosts.parent.mkdir(parents=True)
            hosts.write_text(
                f"127.0.0.1 localhost\n127.0.1.1 {node.host}\n{other.address} {other.host}\n"
            )
        end, far_end = f"ve{key}1", f"ve{key}2"
        peer = ("peer", "name", far_end, "netns", two.namespace)
        _ip("link", "add", end, "netns", one.namespace, "type", "veth", *peer)
        for number, node, device in ((1, one, end), (2, two, far_end)):
            address = network.format(number)
            no_wait = ["nodad"] if ":" in address else []
            _ip("-n", node.namespace, "addr", "add", address, "dev", device, *no_wait)
            _ip("-n", node.namespace, "link", "set", device, "up")
            _ip("-n", node.namespace, "link", "set", "lo", "up")
        yield one, two


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _add(namespace: str) -> None:
    try:
        _ip("netns", "add", namespace)
    except OSError as error:
        pytest.skip(f"no network namespaces here: {error}")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")


def _delete(namespace: str) -> None:
    if (NAMESPACES / namespace).exists():
        _ip("netns", "del", namespace)
    shutil.rmtree(FILES / namespace, ignore_errors=True)


def _sweep() -> None:
    """Delete what test runs left that were killed."""
    for folder in (NAMESPACES, FILES):
        for entry in folder.glob(f"{PREFIX}-*"):
            match = re.fullmatch(rf"{PREFIX}-(\d+)-.*", entry.name)
            if match and not Path("/proc", match[1]).exists():
                _delete(entry.name)
