"""launch/slurm/serve.sbatch, run as Slurm runs it: srun and scontrol are ours, the rest is real."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import aiohttp
import pytest
from support.fake_slurm import FakeSlurm
from support.launching import STORIES, Launch

pytestmark = [
    pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model"),
    pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="the script wants a venv"),
]

SCRIPT = Path(__file__).parents[2] / "launch" / "slurm" / "serve.sbatch"
PROMPT = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
LONG = {**PROMPT, "max_tokens": 450, "n": 4, "stream": True}
JOB_S = 600


@pytest.mark.parametrize(
    ("number", "is_requeued"),
    [
        (signal.SIGUSR1, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.layouts),
    ],
)
async def test_a_job_serves_drains_and_goes_back_to_the_queue(
    tmp_path: Path, number: signal.Signals, is_requeued: bool
) -> None:
    """Slurm signals the tasks, not the script. SIGTERM is what `scancel --signal=TERM` sends."""
    slurm = FakeSlurm(tmp_path, 2, int(time.time()) + JOB_S)
    environment = {**slurm.environment, "AIOENGINE_VENV": sys.prefix}
    flags = ("--model", str(STORIES), "-pp", "2")
    with Launch(*flags, command=["bash", str(SCRIPT)], env=environment) as launch:
        url = launch.wait_ready()
        key = (slurm.job_dir / "api-key").read_text()
        assert (slurm.job_dir / "endpoint").read_text() == url + "\n"
        assert not any(key in command_line(pid) for pid in launch.pids_left())
        local_url = f"http://127.0.0.1:{url.rpartition(':')[2]}"  # the name may not resolve here
        authorized = {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession(local_url, headers=authorized) as session:
            async with session.get("/v1/models", headers={"Authorization": ""}) as refused:
                assert refused.status == 401
            async with session.get("/server_info") as info:
                ranks = (await info.json())["replicas"][0]["ranks"]
            async with session.post("/v1/completions", json=LONG) as response:
                await response.content.readline()
                for rank in ranks:
                    os.kill(rank["pid"], number)
                await asyncio.to_thread(launch.wait_line, "draining: ")  # noqa: TID251
                await check_draining(session, is_requeued)
                text = (await response.read()).decode()
        assert text.count('"finish_reason":"length"') == LONG["n"]
        assert text.endswith("data: [DONE]\n\n")
        assert launch.wait_end() == 0
        assert not launch.pids_left()
    for rank in (0, 1):
        assert "ended in order" in (slurm.job_dir / "run0" / f"rank{rank}.log").read_text()
    assert not (slurm.job_dir / "endpoint").exists()
    assert slurm.scontrol_calls() == ([f"requeue {slurm.job_id}"] if is_requeued else [])


async def check_draining(session: aiohttp.ClientSession, for_walltime: bool) -> None:
    async with session.get("/health") as health:
        body = await health.json()
    assert body["status"] == "draining"
    assert ("walltime: the job ends at" in str(body.get("causes"))) == for_walltime
    async with session.post("/v1/completions", json=PROMPT) as refused:
        assert refused.status == 503
        assert (int(refused.headers["Retry-After"]) > JOB_S / 2) == for_walltime


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


async def test_a_key_of_the_users_own_and_logs_of_every_run(tmp_path: Path) -> None:
    """After a requeue, with a server that does not come up."""
    slurm = FakeSlurm(tmp_path, 1, int(time.time()) + JOB_S)
    key_file = tmp_path / "key"
    key_file.write_text("mine\n")
    slurm.job_dir.mkdir()
    (slurm.job_dir / "endpoint").write_text("http://gone\n")
    environment = {
        **slurm.environment,
        "AIOENGINE_VENV": sys.prefix,
        "AIOENGINE_API_KEY_FILE": str(key_file),
        "SLURM_RESTART_COUNT": "1",
    }
    with Launch("--model", "/nowhere", command=["bash", str(SCRIPT)], env=environment) as launch:
        assert launch.wait_end() == 1
    assert (slurm.job_dir / "api-key.toml").read_text() == 'api_key = "mine"\n'
    assert "/nowhere" in (slurm.job_dir / "run1" / "rank0.log").read_text()
    assert not (slurm.job_dir / "endpoint").exists()
    assert slurm.scontrol_calls() == []
