"""Launches over two nodes, by two torchrun agents or by srun: tokens equal the references."""

import re

import pytest
from support.golden_rows import check_rows
from support.launching import SHARED, STORIES, Launch, free_port, golden
from support.starters import srun, torchrun_agents
from support.two_nodes import two_nodes

pytestmark = pytest.mark.skipif(not SHARED.exists(), reason="needs the shared reference values")

MODEL = ("--model", str(STORIES))
PORT = "29400"
"""In namespaces of their own nobody else has it."""


@pytest.mark.parametrize("axis", ["tp", pytest.param("pp", marks=pytest.mark.layouts)])
async def test_two_agents_on_one_machine(axis: str) -> None:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}")
    agents = torchrun_agents([meeting, meeting], per_node=1)
    with Launch(*MODEL, f"-{axis}", "2", command=agents) as launch:
        await check_rows(launch.wait_ready(), golden("stories260k_greedy"))
        check_backends(launch.log, axis)


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_two_agents_in_two_namespaces(axis: str) -> None:
    """The first node knows its own name, which is that of the rendezvous, as 127.0.1.1 only."""
    with two_nodes() as nodes:
        master = ("--master-addr", nodes[0].host, "--master-port", PORT, "--node-rank")
        agents = torchrun_agents([(*master, "0"), (*master, "1")], per_node=1, nodes=nodes)
        with Launch(*MODEL, f"-{axis}", "2", command=agents) as launch:
            url = launch.wait_ready()
            nodes[0].run(check_rows(url, golden("stories260k_greedy")))
            for node in nodes:
                assert f"address for other ranks: {node.address} on interface ve" in launch.log
            check_backends(launch.log, axis)


def check_backends(log: str, axis: str) -> None:
    """Nodes share no memory, even if they are one machine; the log says why only gloo is there."""
    assert re.search(rf"Using \['gloo'\] .*group '{axis}:0'", log)
    reason = {
        "tp": "rank 0 is on node 0 and rank 1 on node 1",
        "pp": "its ranks only send and receive",
    }[axis]
    assert log.count(f"group '{axis}:0' goes without shm: {reason}") == 1


def test_a_step_in_two_namespaces() -> None:
    """Each node runs one stage of two ranks."""
    with (
        two_nodes() as nodes,
        Launch(*MODEL, "-tp", "2", "-pp", "2", command=srun(4, nodes)) as launch,
    ):
        url = launch.wait_ready()
        nodes[0].run(check_rows(url, golden("stories260k_greedy")))
        launch.terminate()
        assert launch.wait_end() == 0
        assert launch.log.count("ended in order") == 4
