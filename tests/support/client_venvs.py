"""Virtual environments for third-party clients: their dependencies are none of ours."""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path


def client_venv(*requirements: str) -> Path:
    """The folder of programs of an environment with these packages; made once, kept for later."""
    digest = hashlib.sha256(repr((sys.version, requirements)).encode()).hexdigest()[:16]
    root = Path(tempfile.gettempdir()) / "aioengine-clients" / digest
    mark = root / "complete"
    if not mark.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", root], check=True)
        subprocess.run([root / "bin" / "pip", "install", "-q", *requirements], check=True)
        mark.touch()
    return root / "bin"
