"""The command line of launch/kubernetes/several-nodes.yaml, run in two "pods" of this host."""

import sys

import aiohttp
import pytest
from support.golden_rows import check_rows
from support.launching import SHARED, STORIES, Launch, free_port, golden
from support.manifests import KUBERNETES, command, pod_templates, workload
from support.starters import side_by_side

pytestmark = [
    pytest.mark.skipif(not SHARED.exists(), reason="needs the shared reference values"),
    pytest.mark.layouts,
]


async def test_a_group_of_pods_is_one_launch() -> None:
    """Deleting the group sends SIGTERM to every torchrun; each ends with 1 after the drain."""
    templates = pod_templates(workload(KUBERNETES / "several-nodes.yaml"))
    port = free_port()
    changed = {
        "--nproc-per-node": "1",
        "--tensor-parallel-size": "1",
        "--master-port": str(port),
        "--model": str(STORIES),
    }
    pods = []
    for index, template in enumerate(templates):
        variables = {
            "LWS_GROUP_SIZE": "2",
            "LWS_WORKER_INDEX": str(index),
            "LWS_LEADER_ADDRESS": "localhost",
        }
        _, *rest = command(template, variables)
        words = [sys.executable, "-m", "torch.distributed.run"]
        for word in rest:
            flag, _, _ = word.partition("=")
            if flag != "--config":
                words.append(f"{flag}={changed[flag]}" if flag in changed else word)
        pods.append((words, {"AIOENGINE_JOB_SECRET": "secret", "AIOENGINE_HOST_IP": "127.0.0.1"}))
    with Launch(command=side_by_side(pods)) as launch:
        url = launch.wait_ready()
        url = f"http://127.0.0.1:{url.rpartition(':')[2]}"
        await check_rows(url, golden("stories260k_greedy"))
        async with aiohttp.ClientSession(url) as session, session.get("/server_info") as info:
            assert len((await info.json())["replicas"][0]["ranks"]) == 2
        launch.terminate()
        assert launch.wait_end() == 1
        assert launch.log.count("ended in order") == 2
        assert not launch.pids_left()
