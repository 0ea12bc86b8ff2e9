"""Suites of tests that run inside a client's own environment, against a launch of ours."""

import subprocess
from pathlib import Path

from support.client_venvs import client_venv

SUITES = Path(__file__).parent / "clients_python"
PYTEST = "pytest==9.2.0"
LIMIT_S = 600


def run_suite(name: str, requirement: str, url: str, key: str, home: Path, **env: str) -> str:
    """What pytest said of that file, of which all tests passed."""
    program = client_venv(requirement, PYTEST) / "pytest"
    environment = {
        "PATH": "/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HOME": str(home),
        "SUITE_URL": url,
        "SUITE_KEY": key,
        **env,
    }
    command = [program, SUITES / name]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5000:]
    return ran.stdout
