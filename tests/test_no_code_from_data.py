"""Data never become code: nothing of ours reaches pickle and its kin, nor eval and exec.

The first half reads the source text; the second runs a launch in which unpickling is an error.
"""

import ast
import re
import sys
from pathlib import Path

import aiohttp
import pytest
from support.launching import STORIES, Launch, post
from support.source_text import (
    Findings,
    Source,
    is_within,
    names,
    origins,
    read_sources,
    resolved,
)

MODULES = {
    **dict.fromkeys(
        ("pickle", "_pickle", "pickletools", "copyreg", "cloudpickle", "dill", "joblib", "shelve"),
        "it pickles",
    ),
    **dict.fromkeys(
        ("multiprocessing", "_multiprocessing", "torch.multiprocessing", "torch.distributed.rpc"),
        "its queues and connections pickle",
    ),
    **dict.fromkeys(("torch.serialization", "numpy.lib.format"), "it pickles"),
    **dict.fromkeys(("marshal", "runpy", "builtins"), "it makes or runs code"),
    **dict.fromkeys(("torch.hub", "torch.package", "torch.jit", "torch.export"), "it loads code"),
    "importlib.machinery": "it loads code",
    "logging.config": "its listener evaluates what it receives",
    "yaml": "its loaders make objects",
}
"""With everything in them."""
NAMES = {
    **dict.fromkeys(("eval", "exec", "compile", "__import__"), "it makes or runs code"),
    **dict.fromkeys(("torch.load", "torch.save"), "it pickles"),
    **dict.fromkeys(("numpy.load", "numpy.save", "numpy.savez"), "it pickles arrays of objects"),
    "concurrent.futures.ProcessPoolExecutor": "it pickles",
    "importlib.util.module_from_spec": "it loads code",
}
ATTRIBUTES = {
    **dict.fromkeys(
        (
            *("all_gather_object", "broadcast_object_list", "gather_object"),
            *("recv_object_list", "scatter_object_list", "send_object_list"),
        ),
        "object collectives pickle",
    ),
    **dict.fromkeys(("__reduce__", "__reduce_ex__", "__setstate__"), "only pickle calls it"),
    **dict.fromkeys(("Unpickler", "Pickler", "ForkingPickler"), "it pickles"),
    **dict.fromkeys(("trust_remote_code", "allow_pickle", "weights_only"), "data would be code"),
}
"""Attributes of anything, methods, and keywords of calls."""
IMPORTERS = {
    "aioengine/__init__.py": "AsyncEngine",
    "aioengine/checkpoint/hub.py": "huggingface_hub",
    "aioengine/bench/serve.py": "its part that draws, which needs an extra",
    "aioengine/cli/commands.py": "our own commands",
    "aioengine/cli/layout.py": "its part that needs torch",
    "aioengine/cli/serve.py": "its part that needs torch",
    "aioengine/dist/shared_memory.py": "the kernels",
    "aioengine/engine/executor_backend.py": "the module that a flag names",
    "aioengine/layers/attention.py": "the backend of the CPU, which needs numba",
    "aioengine/layers/backend.py": "the backend of the CPU, which needs numba",
    "aioengine/layers/team.py": "the threads of the CPU, which need numba",
    "aioengine/rpc.py": "the module of a function that the program around the engine has passed",
    "aioengine/worker/sampler.py": "the kernel of draws on CPU, which needs numba",
}
"""Who imports a module when it runs, and which."""
GETTERS = {
    "aioengine/dist/tensor_dict.py": "a dtype, which is checked",
    "aioengine/worker/runner.py": "a dtype of EngineConfig or ModelConfig",
    "aioengine/cli/layout_model.py": "a dtype of ModelConfig",
    "aioengine/bench/collectives.py": "a dtype of the command line",
}
"""Who takes what a variable says out of torch, and what that is."""


def check_names(source: Source) -> Findings:
    for line, name in [*names(source.tree), *names_as_text(source.tree)]:
        for module, reason in MODULES.items():
            if is_within(name, module):
                yield line, f"{name}: {reason}"
        if reason := NAMES.get(name) or ATTRIBUTES.get(name.rpartition(".")[2]):
            yield line, f"{name}: {reason}"


def names_as_text(tree: ast.Module) -> Findings:
    """Methods, keywords, getattr(torch, "load"), import_module("pickle")."""
    origin = origins(tree)
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name):
                yield node.lineno, f"def.{name}"
            case ast.keyword(arg=str(name)):
                yield node.value.lineno, f"keyword.{name}"
            case ast.Call(
                func=ast.Name(id="getattr"), args=[owner, ast.Constant(value=str(name)), *_]
            ):
                yield node.lineno, f"{resolved(owner, origin)}.{name}"
            case ast.Call(func=func, args=[ast.Constant(value=str(name)), *_]):
                if resolved(func, origin) == "importlib.import_module":
                    yield node.lineno, name


def check_dynamic_names(source: Source) -> Findings:
    """A module or an attribute whose name is made at run time."""
    for line, name in names(source.tree):
        if name == "importlib.import_module" and source.path not in IMPORTERS:
            yield line, f"{name}: only {', '.join(IMPORTERS)} may"
    origin = origins(source.tree)
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(), *_]):
                pass
            case ast.Call(func=ast.Name(id="getattr"), args=[owner, _, *_]):
                name = resolved(owner, origin)
                if is_within(name, "torch") and source.path not in GETTERS:
                    yield node.lineno, f"getattr({name}, …): only {', '.join(GETTERS)} may"


CHECKS = [check_names, check_dynamic_names]


def test_nothing_of_ours_reaches_them() -> None:
    found = [
        f"{source.path}:{line}: {message}"
        for source in read_sources()
        if source.is_ours
        for check in CHECKS
        for line, message in sorted(set(check(source)))
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads as read",
        "import cloudpickle as c",
        "import _pickle",
        "import marshal",
        "import shelve",
        "from multiprocessing import Queue",
        "from multiprocessing.connection import Client",
        "import torch.multiprocessing as mp",
        "from concurrent.futures import ProcessPoolExecutor",
        "import torch as t\nt.load('x')",
        "from torch import load as read",
        "from torch import serialization",
        "import torch\ntorch.save({}, 'x')",
        "import torch\nread = getattr(torch, 'load')",
        "import torch\nread = getattr(torch, name)",
        "import torch\ntorch.hub.load('x')",
        "import torch\ntorch.jit.load('x')",
        "import numpy as np\nnp.load('x')",
        "read('x', allow_pickle=True)",
        "read('x', weights_only=False)",
        "model('x', trust_remote_code=True)",
        "import torch.distributed as dist\ndist.broadcast_object_list([])",
        "group.all_gather_object([], 1)",
        "from torch.distributed import gather_object as gather",
        "eval('1')",
        "run = exec",
        "compile('1', '', 'eval')",
        "__import__('x')",
        "import builtins\nbuiltins.eval('1')",
        "from builtins import eval as e",
        "import importlib\nimportlib.import_module(name)",
        "from importlib import import_module as load\nload('json')",
        "import importlib.util\nimportlib.util.module_from_spec(spec)",
        "from importlib import import_module as i\ni('pickle')",
        "import yaml",
        "class A:\n    def __reduce__(self): ...",
    ],
)
def test_a_way_to_them_is_found(text: str) -> None:
    source = Source("aioengine/x.py", text)
    assert [finding for check in CHECKS for finding in check(source)]


@pytest.mark.parametrize(
    "text",
    [
        "import re\nre.compile('x')",
        "import torch\ntorch.compile(f)",
        "model.eval()",
        "store.load('x')",
        "from safetensors import safe_open",
        "import concurrent.futures\nconcurrent.futures.ThreadPoolExecutor(1)",
        "import torch\nx = getattr(torch, 'float32')",
        "error('code')",
        "group.broadcast_object(1)",
    ],
)
def test_what_is_harmless_passes(text: str) -> None:
    source = Source("aioengine/x.py", text)
    assert not [finding for check in CHECKS for finding in check(source)]


@pytest.mark.skipif(not STORIES.exists(), reason="needs the shared model")
async def test_a_launch_unpickles_nothing() -> None:
    """It starts, serves, calls methods on all ranks and ends, with pickle made unusable."""
    module = "support.without_unpickling"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    flags = ("--model", str(STORIES), "-tp", "2", "--admin-api-key", "key")
    root = Path(__file__).parents[1]
    with Launch(
        *flags,
        command=[*torchrun, "--nproc-per-node", "2", "-m", module],
        env={"PYTHONPATH": f"{root}:{root / 'tests'}"},
    ) as launch:
        headers = {"Authorization": "Bearer key"}
        async with aiohttp.ClientSession(launch.wait_ready(), headers=headers) as session:
            body = {"prompt": "Once upon a time", "max_tokens": 8, "logprobs": 2}
            await post(session, "/v1/completions", {**body, "presence_penalty": 0.5})
            answer = await post(session, "/collective_rpc", {"method": "rank_info"})
            assert [info["rank"] for info in answer["results"]] == [0, 1]
        launch.terminate()
        launch.wait_end()
        assert launch.log.count("ended in order") == 2
        assert re.findall(r"was reached by (\S+)", launch.log) == ["__main__"] * 2  # to try it out
