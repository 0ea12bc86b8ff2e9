"""schemathesis reads /openapi.json and sends some thousands of requests, right and wrong ones."""

import re
import subprocess
from pathlib import Path

import pytest
from support.client_venvs import client_venv
from support.launching import STORIES, Launch

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model"),
]

VERSION = "4.32.5"
LIMIT_S = 900
CONTEXT = "64"
"""Short: most of the answers run to its end."""
LEFT_OUT = {
    # check: why
    "positive_data_acceptance": "lengths in tokens and rules between fields are no schema",
    "ignored_auth": "the server asks for no key",
}
WAITING = {
    # route: why it is not asked
    "/trace/steps": "waits for steps, up to a minute each time",
    "/collective_rpc": "a time-out that the client chose is a 504",
}


def test_no_5xx_no_wrong_schema_no_hang(tmp_path: Path) -> None:
    keys = ("--admin-api-key", "open")
    with Launch("--model", str(STORIES), "--max-model-len", CONTEXT, *keys) as launch:
        num_cases = run_schemathesis(launch.wait_ready(), tmp_path)
        assert num_cases > 2000
        assert "Traceback" not in launch.log


def run_schemathesis(url: str, folder: Path) -> int:
    """The number of requests it made; `folder` is where it leaves its files."""
    command = [
        *(client_venv(f"schemathesis=={VERSION}") / "schemathesis", "run", f"{url}/openapi.json"),
        *("--header", "Authorization: Bearer open"),
        *("--checks", "all", "--exclude-checks", ",".join(LEFT_OUT)),
        *("--phases", "examples,coverage,fuzzing", "--max-examples", "200"),
        *("--request-timeout", "60", "--max-response-time", "60", "--continue-on-failure"),
        *("--seed", "1", "--generation-database", "none"),
    ]
    for route in WAITING:
        command += ["--exclude-path", route]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stdout[-10_000:]
    found = re.search(r"(\d+) generated", ran.stdout)
    assert found is not None
    return int(found[1])
