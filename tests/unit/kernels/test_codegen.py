"""Machine code from the cache is never that of other sources; registers are the processor's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aioengine import kernels
from aioengine.kernels.codegen import registers_of

CALLED = """
from aioengine.kernels.codegen import inlined

@inlined
def value(args):
    return 1
"""
KERNEL = """
from numba import carray
from aioengine.kernels.called import value
from aioengine.kernels.codegen import entry, kernel

@kernel
def chunk(args, chunk, thread):
    value(args)

@entry
def function(args):
    return value(args)

value_now = function(0)
print(chunk.was_cached, sum(function.stats.cache_hits.values()) == 1, value_now)
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that a test may change."""
    source = Path(kernels.__path__[0])
    copy = tmp_path / "aioengine" / "kernels"
    copy.mkdir(parents=True)
    (copy.parent / "__init__.py").touch()
    for name in ("__init__.py", "codegen.py"):
        shutil.copy(source / name, copy)
    (copy / "called.py").write_text(CALLED)
    (copy / "kernel.py").write_text(KERNEL)
    return copy


def compiled(package: Path, **environment: str) -> str:
    """What a new process says: whether kernel and function were cached, and what it computes."""
    command = [sys.executable, "-c", "import aioengine.kernels.kernel"]
    root = package.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), **environment}
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_a_second_process_compiles_nothing_until_a_called_module_changes(package: Path) -> None:
    assert compiled(package) == "False False 1"
    assert compiled(package) == "True True 1"
    date = (package / "kernel.py").stat()
    (package / "called.py").write_text(CALLED.replace("return 1", "return 2"))
    assert (package / "kernel.py").stat() == date, "numba's own rule sees no change"
    assert compiled(package) == "False False 2"


def test_without_a_place_for_the_cache_everything_is_compiled(package: Path) -> None:
    nowhere = {"NUMBA_CACHE_LOCATOR_CLASSES": "IPythonCacheLocator"}  # serves no file
    assert compiled(package, **nowhere) == "False False 1"
    assert not list(package.rglob("*.nbi"))


@pytest.mark.parametrize(
    ("machine", "features", "registers"),
    [
        ("x86_64", "+64bit,+avx,+avx2,+avx512f,+avx512vl", (16, 32)),
        ("x86_64", "+64bit,+avx,+avx2,-avx512f", (8, 16)),
        ("x86_64", "+64bit,-avx,-avx2,+sse2", (4, 16)),
        ("aarch64", "+neon,+fp-armv8", (4, 32)),
    ],
)
def test_registers(machine: str, features: str, registers: tuple[int, int]) -> None:
    assert registers_of(machine, features) == registers
