"""DESIGN.md's import table and the house rules, checked on the source text."""

import ast
import sys

import pytest
from support.source_text import (
    Check,
    Findings,
    Source,
    imports,
    is_within,
    names,
    read_sources,
)

MAY_IMPORT = {
    # Part of aioengine: the parts and third-party packages it may import, beside itself and the
    # standard library without GUARDED. "root" is config, flags, layout, messages, …
    "public": "root frontend.sampling",
    "root": "msgspec",
    "core": "root",
    "timeline": "root msgspec",
    "checkpoint": "root gguf numpy msgspec",
    "dist": "root timeline kernels torch numpy msgspec numba llvmlite",
    "kernels": "numpy numba llvmlite",
    "layers": "root timeline dist kernels torch numpy",
    "models": "root dist layers torch",
    "weights": "root checkpoint layers torch numpy safetensors gguf tqdm",
    "worker": "root timeline core.stages checkpoint dist kernels layers models weights msgspec "
    "torch numpy tqdm",
    "control": "root timeline asyncio msgspec",
    "engine": "root timeline core control worker asyncio",
    "frontend": "root timeline checkpoint control asyncio msgspec tokenizers jinja2 "
    "prometheus_client",
    "api": "root timeline frontend asyncio msgspec aiohttp prometheus_client",
    "rank": "root timeline core checkpoint dist worker control engine frontend api asyncio msgspec",
    "embedded": "root dist control engine frontend rank asyncio msgspec uvloop",
    "doctor": "root dist worker control engine rank asyncio msgspec torch rich",
    "bench": "root timeline core checkpoint dist layers weights.loader worker engine frontend "
    "rank.recording embedded cli.layout_model cli.local_ranks cli.rank_flags asyncio msgspec numpy "
    "torch numba rich uvloop httptools matplotlib",
    "cli": "root timeline core checkpoint dist layers models weights worker control engine "
    "frontend api rank doctor embedded bench asyncio msgspec numpy torch rich uvloop setproctitle",
    "launch": "root core checkpoint dist worker control rank asyncio msgspec uvloop setproctitle",
}
GUARDED = {"asyncio"}
"""Standard library modules that a part must list."""

IMPURE = {"asyncio", "logging", "os", "random", "select", "signal", "socket", "subprocess"}
IMPURE |= {"threading", "time"}
PURE_PARTS = {"core"}

FORBIDDEN_NAMES = {
    "asyncio.create_task": "tasks come from a TaskGroup",
    "asyncio.ensure_future": "tasks come from a TaskGroup",
    "asyncio.gather": "tasks come from a TaskGroup",
    "asyncio.to_thread": "its pool joins its threads at exit",
    "typing.TYPE_CHECKING": "a cycle means that a type sits in the wrong file",
    "__future__.annotations": "msgspec reads annotations at run time",
}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv"}
ENVIRONMENT_FILES = (
    "aioengine/dist/launcher.py",
    "aioengine/launch.py",
    "aioengine/openmp_waits.py",
    "aioengine/embedded/engine.py",
    "aioengine/cli/serve.py",
    "aioengine/bench/collectives.py",
    "aioengine/bench/steps.py",
    "aioengine/bench/throughput.py",
    "aioengine/bench/roofline.py",
    "aioengine/cli/doctor.py",
    "aioengine/cli/trace_server.py",
)
TORCH_DISTRIBUTED_FILES = ("aioengine/dist/", "aioengine/worker/", "aioengine/cli/local_ranks.py")

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60


# --- checks --------------------------------------------------------------------------------------


def check_import_table(source: Source) -> Findings:
    if not source.part:
        return
    if source.part not in MAY_IMPORT:
        yield 1, f"aioengine/{source.part}/ is not in the import table"
        return
    allowed = MAY_IMPORT[source.part].split()
    for line, name in imports(source.tree):
        target = imported_part(name)
        if target.split(".")[0] == source.part or any(is_within(target, a) for a in allowed):
            continue
        if target in sys.stdlib_module_names and target not in GUARDED:
            continue
        yield line, f"{source.part} may not import {target} (it may: {', '.join(allowed)})"


def imported_part(name: str) -> str:
    """ "core.stages.split" for a module of ours in a package, "root", or a third-party top name."""
    top, *rest = name.split(".")
    if top != "aioengine":
        return top
    if rest[:1] == ["launch"]:
        return "launch"
    return ".".join(rest) if rest and rest[0] in MAY_IMPORT else "root"


def check_pure_core(source: Source) -> Findings:
    if source.part in PURE_PARTS:
        for line, name in imports(source.tree):
            if name.split(".")[0] in IMPURE:
                yield line, f"{source.part} is pure: no {name.split('.')[0]}"


def check_import_style(source: Source) -> Findings:
    if not source.is_ours:
        return
    for line, name in imports(source.tree):
        if name.startswith("."):
            yield line, "relative import"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.Import | ast.ImportFrom):
                    yield inner.lineno, f"import inside {node.name}"


def check_sizes(source: Source) -> Findings:
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        yield num_lines, f"file has {num_lines} lines, limit {MAX_FILE_LINES}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {num_lines} lines, limit {MAX_FUNCTION_LINES}"


def check_environment(source: Source) -> Findings:
    if source.part and source.path not in ENVIRONMENT_FILES:
        for line, name in names(source.tree):
            if name in ENVIRONMENT:
                yield line, f"{name}: only {', '.join(ENVIRONMENT_FILES)} read the environment"


def check_torch_distributed(source: Source) -> Findings:
    if source.part and not source.path.startswith(TORCH_DISTRIBUTED_FILES):
        for line, name in names(source.tree):
            if is_within(name, "torch.distributed"):
                yield line, f"torch.distributed belongs in {', '.join(TORCH_DISTRIBUTED_FILES)}"


def check_forbidden(source: Source) -> Findings:
    if not source.is_ours:
        return
    for line, name in names(source.tree):
        if reason := FORBIDDEN_NAMES.get(name):
            yield line, f"{name}: {reason}"


def check_empty_init(source: Source) -> Findings:
    inner = source.path.startswith("aioengine/") and source.path != "aioengine/__init__.py"
    if inner and source.path.endswith("/__init__.py") and source.text.strip():
        yield 1, "__init__.py must be empty"


CHECKS: list[Check] = [
    check_import_table,
    check_pure_core,
    check_import_style,
    check_sizes,
    check_environment,
    check_torch_distributed,
    check_forbidden,
    check_empty_init,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_all_files_pass(check: Check) -> None:
    found = [
        f"{source.path}:{line}: {message}"
        for source in read_sources()
        for line, message in sorted(set(check(source)))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("check", "path", "text"),
    [
        (check_import_table, "core/x.py", "import torch"),
        (check_import_table, "core/x.py", "from aioengine.dist import groups"),
        (check_import_table, "worker/x.py", "from aioengine.core.scheduler import Scheduler"),
        (check_import_table, "worker/x.py", "from aioengine.core import scheduler"),
        (check_import_table, "frontend/x.py", "import torch.nn as nn"),
        (check_import_table, "layers/x.py", "import asyncio"),
        (check_import_table, "cli/x.py", "from aioengine.launch import main"),
        (check_import_table, "cli/x.py", "from aioengine import launch"),
        (check_import_table, "config.py", "from aioengine.core.request import Request"),
        (check_import_table, "novel/x.py", ""),
        (check_pure_core, "core/x.py", "import time"),
        (check_pure_core, "core/x.py", "from os.path import join"),
        (check_import_style, "core/x.py", "def f():\n    import json"),
        (check_import_style, "core/x.py", "from .blocks import BlockPool"),
        (check_sizes, "core/x.py", "x = 1\n" * 501),
        (check_sizes, "core/x.py", "def f():\n" + "    x = 1\n" * 60),
        (check_environment, "api/x.py", "import os\nos.environ['A']"),
        (check_environment, "api/x.py", "from os import getenv\ngetenv('A')"),
        (check_torch_distributed, "layers/x.py", "import torch.distributed as dist"),
        (check_torch_distributed, "layers/x.py", "from torch import distributed"),
        (check_torch_distributed, "layers/x.py", "import torch\ntorch.distributed.barrier()"),
        (check_forbidden, "api/x.py", "from typing import TYPE_CHECKING"),
        (check_forbidden, "api/x.py", "from __future__ import annotations"),
        (check_forbidden, "api/x.py", "import asyncio\nasyncio.gather()"),
        (check_empty_init, "core/__init__.py", "from aioengine.core.blocks import BlockPool"),
    ],
)
def test_a_breach_is_found(check: Check, path: str, text: str) -> None:
    assert list(check(Source(f"aioengine/{path}", text)))


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("core/x.py", "from aioengine.layout import Axis\nimport hashlib"),
        ("worker/x.py", "from aioengine.core.stages import split_layers\nimport torch"),
        ("worker/x.py", "from torch.distributed import Work\nmodel.eval()"),
        ("launch.py", "import os\nfrom aioengine.control import watch\nos.environ['A']"),
        ("dist/launcher.py", "from os import environ\nenviron['A']"),
        ("engine/x.py", "import asyncio\nasync with asyncio.TaskGroup() as g: g.create_task(f())"),
    ],
)
def test_what_is_right_passes(path: str, text: str) -> None:
    source = Source(f"aioengine/{path}", text)
    assert [finding for check in CHECKS for finding in check(source)] == []
