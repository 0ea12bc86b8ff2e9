"""`torchrun --nnodes 1:2` with `-dp auto`: the world shrinks to the node that is left and grows."""

import os
import signal
import sys

import aiohttp
import pytest
from support.launching import STORIES, Launch, free_port, post

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model"),
]

QUICK = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2"
BODY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "max_tokens": 20}


class Job:
    """Two agents on this machine, of which the first serves the rendezvous."""

    def __init__(self) -> None:
        self._meeting = f"127.0.0.1:{free_port()}"
        self._flags = ("--model", str(STORIES), "-dp", "auto", "--port", str(free_port()))

    def agent(self, *, hosts_rendezvous: bool) -> Launch:
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
        command += ["--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
        command += ["--rdzv-id", "job", "--rdzv-endpoint", self._meeting]
        command += ["--rdzv-conf", f"{QUICK},is_host={int(hosts_rendezvous)}"]
        # Else torch's agents wait for each other when one has come back.
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return Launch(*self._flags, command=[*command, "-m", "aioengine.launch"], env=env)


async def answer(url: str, num_ranks: int) -> str:
    """What the launch says, on that many ranks."""
    async with aiohttp.ClientSession(url) as session:
        async with session.get("/server_info") as info:
            body = await info.json()
        assert (body["launch_world_size"], body["status"]) == (num_ranks, "ok")
        text: str = (await post(session, "/v1/completions", BODY))["choices"][0]["text"]
        return text


def kill_node(launch: Launch) -> None:
    for pid in (launch.process.pid, *launch.pids_left()):
        os.kill(pid, signal.SIGKILL)


async def test_a_node_leaves_and_returns() -> None:
    """The one with rank 0: ranks go by address and process id, and its agent is the older one."""
    job = Job()
    with job.agent(hosts_rendezvous=False) as first, job.agent(hosts_rendezvous=True) as stays:
        url = first.wait_ready()
        before = await answer(url, 2)
        kill_node(first)
        assert stays.wait_ready() == url
        assert await answer(url, 1) == before
        with job.agent(hosts_rendezvous=False) as second:
            stays.wait_line("ended in order")
            assert stays.wait_ready(2) == url
            assert await answer(url, 2) == before
            for agent in (second, stays):
                agent.terminate()
            for agent in (second, stays):
                agent.wait_end()
                assert not agent.pids_left()
