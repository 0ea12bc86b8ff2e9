"""The store over which a replica builds its groups: whom it lets in, and until when."""

import os
import socket

import pytest
from support.open_ports import OpenPort, listening_ports
from support.ranks import HOST, TIMEOUT_S

from aioengine.dist.worlds import ServedStore, connect_store


def test_it_listens_on_one_address_until_all_have_come() -> None:
    before = listening_ports(os.getpid())
    store = ServedStore(HOST)
    assert listening_ports(os.getpid()) - before == {OpenPort(HOST, store.port)}
    guest = connect_store(HOST, store.port, TIMEOUT_S)
    store.stop_listening()
    assert listening_ports(os.getpid()) == before
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, store.port))
    guest.set("key", "value")
    assert store.get("key") == b"value"
