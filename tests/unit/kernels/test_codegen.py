"""Machine code from the cache is never that of other sources; pieces of code do what they say."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import types
from numba.extending import intrinsic

from aioengine import kernels
from aioengine.kernels import cache
from aioengine.kernels.codegen import Code, entry, for_each, registers_of

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
    for name in ("__init__.py", "codegen.py", "cache.py"):
        shutil.copy(source / name, copy)
    (copy / "called.py").write_text(CALLED)
    (copy / "kernel.py").write_text(KERNEL)
    return copy


def compiled(package: Path, **environment: str) -> str:
    """What a new process says: whether kernel and function were cached, and what it computes."""
    return said_by(started(package, **environment))


def started(package: Path, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import aioengine.kernels.kernel"]
    root = package.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), **environment}
    return subprocess.Popen(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)


def said_by(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate()
    assert process.returncode == 0
    return output.strip()


def test_a_second_process_compiles_nothing_until_a_called_module_changes(package: Path) -> None:
    assert compiled(package) == "False False 1"
    assert compiled(package) == "True True 1"
    date = (package / "kernel.py").stat()
    (package / "called.py").write_text(CALLED.replace("return 1", "return 2"))
    assert (package / "kernel.py").stat() == date, "numba's own rule sees no change"
    assert compiled(package) == "False False 2"


def test_processes_that_start_together_compile_each_function_once(package: Path) -> None:
    processes = [started(package) for _ in range(3)]
    said = [said_by(process).split() for process in processes]
    for was_cached in list(zip(*said, strict=True))[:2]:
        assert sorted(was_cached) == ["False", "True", "True"]


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a process that holds the lock and was stopped."""
    holder, other = (cache._Lock(tmp_path / "lock") for _ in range(2))
    holder.acquire()
    monkeypatch.setattr(cache, "MAX_WAIT_S", 0.05)
    other.acquire()
    holder.release()
    other.release()


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


@intrinsic
def powers_of_two(typing: Any, source: Any, count: Any, target: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, count, target = args

        def power(code: Code, i: Any) -> None:
            code.store(code.exp2(code.load(code.at(source, i, 4))), code.at(target, i, 4))

        for_each(builder, count, power)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@entry
def run_powers_of_two(source: int, count: int, target: int) -> None:
    powers_of_two(source, count, target)


def test_powers_of_two() -> None:
    """Of any number of elements: whole vectors and what is left."""
    exponents = np.linspace(-126, 127, 1001).astype(np.float32)
    expected = np.exp2(exponents.astype(np.float64))  # in float32 numpy is off by 2e-7 itself
    for count in (-3, 0, 1, 15, 16, 17, 1001):
        powers = np.full(1001, 3.0, np.float32)
        run_powers_of_two(exponents.ctypes.data, count, powers.ctypes.data)
        done = max(count, 0)
        np.testing.assert_allclose(powers[:done], expected[:done], rtol=2.5e-7)
        assert (powers[done:] == 3).all()
    tiny = np.array([-126.5, -1000.0, -np.inf], np.float32)
    run_powers_of_two(tiny.ctypes.data, 3, tiny.ctypes.data)
    assert (tiny == 0).all()


@entry
def quotient(a: float, b: float) -> float:
    return a / b


def test_a_division_by_zero_is_no_exception() -> None:
    assert quotient(1.0, 0.0) == np.inf
