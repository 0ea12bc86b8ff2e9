"""--distributed-executor-backend: an executor of the user's own in place of ours."""

import os
import re
from pathlib import Path

import pytest
from support.own_executors import CountingExecutor
from support.replicas import info, request, running_replica

from aioengine.engine.executor import Executor
from aioengine.engine.executor_backend import METHODS, load_executor
from aioengine.messages import ReplicaReady

OWN = "support.own_executors"


def test_auto_is_ours() -> None:
    assert load_executor("auto") is Executor
    assert load_executor("aioengine.engine.executor:Executor") is Executor


@pytest.mark.parametrize("num_peers", [0, 3])
@pytest.mark.parametrize("name", ["CountingExecutor", "Forwarding"])
async def test_a_replica_runs_on_an_executor_of_its_own(num_peers: int, name: str) -> None:
    executor = load_executor(f"{OWN}:{name}")
    async with running_replica(num_peers, over_tcp=True, executor=executor) as replica:
        await replica.front_ends[0].next(ReplicaReady)
        replica.front_ends[0].send(request("a"))
        await replica.front_ends[0].until_finished("a")
        values = await replica.leader.collective_rpc("support.rpc_methods:rank_of")
        assert values == list(range(num_peers + 1))
        used = replica.leader._executor
        assert isinstance(used, executor)
        if isinstance(used, CountingExecutor):
            assert used.num_plans >= 5
            assert used.calls[0] == "open_device"
            assert used.calls[-1] == "support.rpc_methods:rank_of"
    for outcome in replica.outcomes:
        assert await outcome is None


async def test_a_failure_is_told_through_it() -> None:
    executor = load_executor(f"{OWN}:Forwarding")
    async with running_replica(2, over_tcp=True, executor=executor) as replica:
        await replica.front_ends[0].next(ReplicaReady)
        replica.kill(2)
        for rank in (0, 1):
            assert str(info(2)) in (await replica.failure(rank)).cause


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("", "expected auto or module:Class, got ''"),
        ("ray", "expected auto or module:Class, got 'ray'"),
        (":Executor", "expected auto or module:Class"),
        (f"{OWN}:", "expected auto or module:Class"),
        ("no_such_module:Executor", "cannot import no_such_module: ModuleNotFoundError: No module"),
        ("..relative:Executor", "cannot import ..relative: TypeError"),
        (f"{OWN}:Missing", f"module {OWN} has no Missing"),
        (f"{OWN}:no_class", "no_class is no class but a function"),
        (f"{OWN}:Empty", f"Empty is no executor, it lacks {', '.join(METHODS)}"),
        (f"{OWN}:Declared", ", ".join(name for name in METHODS if name != "submit")),
        (f"{OWN}:Unfinished", "Unfinished is no executor, it lacks submit"),
        (
            f"{OWN}:OtherArguments",
            "its constructor must take the keywords watch, device, worker, peers, output_rank, "
            "on_step, on_news (missing a required argument: 'address')",
        ),
        (f"{OWN}:NoConstructor", "its constructor must take the keywords watch"),
        (f"{OWN}:OtherMethods", "submit must take (self, plan"),
        (f"{OWN}:OtherMethods", "call must be async"),
        (f"{OWN}:OtherMethods", "look is no method"),
    ],
)
def test_a_wrong_one_is_refused(name: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)) as caught:
        load_executor(name)
    assert str(caught.value).startswith("--distributed-executor-backend")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("1 / 0", "ZeroDivisionError: division by zero"), ("raise SystemExit(0)", "SystemExit: 0")],
)
def test_a_module_that_raises_is_refused(
    text: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_that_raises.py").write_text(text + os.linesep)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=f"cannot import module_that_raises: {complaint}"):
        load_executor("module_that_raises:Executor")
