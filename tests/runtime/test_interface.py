"""Which address other ranks are told, on the real interfaces of namespaces."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from support.two_nodes import Node, two_nodes

from aioengine.dist.interface import (
    interface_of,
    is_this_host,
    list_interfaces,
    means_loopback,
    resolve,
)
from aioengine.dist.launcher import own_address, read_environment

ASK = """
import sys
from aioengine.dist.interface import address_towards, interface_of
try:
    address = address_towards(sys.argv[1])
    print(address, interface_of(address))
except ValueError as error:
    print(error)
"""
RANK_0 = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_ID": "1",
    "SLURM_STEP_NODELIST": "198.51.100.[7-8]",
}


@pytest.fixture
def nodes() -> Iterator[tuple[Node, Node]]:
    with two_nodes() as both:
        yield both


def ask(node: Node, host: str) -> str:
    """The address of `node` towards `host` and its interface, or the error."""
    command = [*node.prefix, sys.executable, "-c", ASK, host]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def ip(node: Node, *arguments: str) -> None:
    subprocess.run(["ip", "-n", node.namespace, *arguments], check=True)


def add_interface(node: Node, name: str, address: str) -> None:
    """One end of a pair whose other end has no address."""
    ip(node, "link", "add", name, "type", "veth", "peer", "name", f"{name}-end")
    ip(node, "addr", "add", address, "dev", name)
    for end in (name, f"{name}-end"):
        ip(node, "link", "set", end, "up")


def test_the_interface_that_routes_to_the_rendezvous(nodes: tuple[Node, Node]) -> None:
    here, there = nodes
    veth = ask(here, there.address)
    assert veth.startswith(f"{here.address} ve")
    assert ask(here, there.host) == veth
    assert ask(here, here.address) == veth
    assert ask(here, "localhost") == ask(here, "127.0.0.1") == "127.0.0.1 lo"
    assert ask(here, "10.88.0.1").startswith(
        "no route to the rendezvous host 10.88.0.1 (10.88.0.1)"
    )
    assert "host 'node9' does not resolve to an address" in ask(here, "node9")


def test_never_loopback_on_the_rendezvous_host_itself(nodes: tuple[Node, Node]) -> None:
    """Its own name is 127.0.1.1 in its /etc/hosts."""
    here, there = nodes
    assert ask(here, here.host).startswith(f"{here.address} ve")  # there is no other
    add_interface(here, "ib0", "10.99.0.1/24")
    found = ask(here, here.host)
    assert "choose one with --host-ip or AIOENGINE_HOST_IP" in found
    assert f"{here.address}," in found
    assert "ib0 10.99.0.1" in found
    ip(here, "route", "add", "default", "via", "10.99.0.9")
    assert ask(here, here.host) == "10.99.0.1 ib0"
    ip(there, "link", "set", ask(there, here.address).split()[1], "down")
    assert "lo 127.0.0.1" in ask(there, there.host)  # all that is left


def test_several_addresses_of_an_interface(nodes: tuple[Node, Node]) -> None:
    here, _ = nodes
    add_interface(here, "ib0", "10.99.0.1/24")
    ip(here, "addr", "add", "10.99.0.2/24", "dev", "ib0", "label", "ib0:1")
    ip(here, "addr", "add", "10.98.0.2/24", "dev", "ib0")
    for address in ("10.99.0.1", "10.99.0.2", "10.98.0.2"):
        assert here.call(lambda address=address: interface_of(address)) == "ib0"  # type: ignore[misc]
    assert here.call(lambda: interface_of("10.99.0.3")) is None
    assert ask(here, "10.98.0.7") == "10.98.0.2 ib0"


def test_a_network_of_ipv6_alone() -> None:
    with two_nodes(network="fd77::{}/64") as (here, there):
        assert ask(here, there.host).startswith("fd77::1 ve")
        assert ask(there, here.address).startswith("fd77::2 ve")
        assert ask(here, here.host).startswith("fd77::1 ve")


def test_this_host() -> None:
    assert "lo 127.0.0.1" in map(str, list_interfaces())
    assert interface_of("127.0.0.1") == "lo"
    assert is_this_host("localhost")
    assert not is_this_host("198.51.100.7")
    assert resolve("198.51.100.7") == ["198.51.100.7"]
    with pytest.raises(ValueError, match="'no such host' does not resolve"):
        resolve("no such host")


def test_what_means_loopback_everywhere() -> None:
    hosts = ("localhost", "localhost.localdomain", "127.0.1.1", "::1", "node1", "10.0.0.1")
    assert list(map(means_loopback, hosts)) == [True, True, True, True, False, False]


def test_an_address_that_is_asked_for() -> None:
    alone = read_environment({})
    assert own_address(alone, None) == "127.0.0.1"
    assert own_address(alone, "127.0.0.1") == "127.0.0.1"
    with pytest.raises(ValueError, match=r"--host-ip 198.51.100.7: no interface .*lo 127.0.0.1"):
        own_address(alone, "198.51.100.7")
    with pytest.raises(ValueError, match="--host-ip must be an IP address, found 'eth0'"):
        own_address(alone, "eth0")
    env = read_environment({"AIOENGINE_HOST_IP": "198.51.100.7"})
    with pytest.raises(ValueError, match=r"AIOENGINE_HOST_IP 198.51.100.7: no interface"):
        own_address(env, None)


def test_rank_0_must_be_where_the_others_look_for_it() -> None:
    expected = r"rank 0 must open the rendezvous at 198.51.100.7 .*SLURM_STEP_NODELIST.* not this"
    with pytest.raises(ValueError, match=expected):
        own_address(read_environment(RANK_0), "127.0.0.1")
    elsewhere = read_environment({**RANK_0, "MASTER_ADDR": "127.0.0.1"})
    assert own_address(elsewhere, None) == "127.0.0.1"
