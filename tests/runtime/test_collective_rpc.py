"""collective_rpc: one call on every rank of a replica, whatever they do with it."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from support import rpc_methods
from support.mailbox import settle
from support.replicas import FakeReplica, info, request, running_replica

from aioengine.errors import RankLostError, ReplicaFailedError, RpcTimeoutError, WorkerError
from aioengine.messages import ReplicaReady
from aioengine.rpc import method_name

PEERS = pytest.mark.parametrize("num_peers", [0, 3])


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    rpc_methods.GATE.set()
    yield
    rpc_methods.GATE.set()


async def ready(replica: FakeReplica) -> None:
    await replica.front_ends[0].next(ReplicaReady)


@PEERS
async def test_values_come_in_rank_order(num_peers: int) -> None:
    async with running_replica(num_peers) as replica:
        await ready(replica)
        values = await replica.leader.collective_rpc(
            rpc_methods.echo, (1, "two", b"three", None), {"four": [4.0, {"five": True}]}
        )
        arguments = [[1, "two", b"three", None], {"four": [4.0, {"five": True}]}]
        assert values == [[rank, *arguments] for rank in range(num_peers + 1)]


@PEERS
async def test_one_value_can_be_asked_for(num_peers: int) -> None:
    async with running_replica(num_peers) as replica:
        await ready(replica)
        rank = await replica.leader.collective_rpc(rpc_methods.rank_of, unique_reply_rank=num_peers)
        assert rank == num_peers
        with pytest.raises(ValueError, match=f"unique_reply_rank {num_peers + 1} is not one of"):
            await replica.leader.collective_rpc("x", unique_reply_rank=num_peers + 1)


@pytest.mark.parametrize(("num_peers", "culprit"), [(0, 0), (3, 0), (3, 2)])
async def test_an_exception_on_any_rank_reaches_the_caller(num_peers: int, culprit: int) -> None:
    """Also when another rank's reply is the one asked for; and the replica goes on."""
    async with running_replica(num_peers) as replica:
        await ready(replica)
        with pytest.raises(WorkerError, match=f"rank {culprit} was told to fail") as caught:
            await replica.leader.collective_rpc(
                rpc_methods.fail_on, (culprit,), unique_reply_rank=num_peers
            )
        assert caught.value.where == f"{info(culprit)}: support.rpc_methods:fail_on"
        assert caught.value.type_name == "KeyError"
        assert "raise KeyError" in caught.value.traceback
        values = await replica.leader.collective_rpc(rpc_methods.rank_of)
        assert values == list(range(num_peers + 1))
        replica.front_ends[0].send(request("a"))
        await replica.front_ends[0].until_finished("a")


async def test_a_late_reply_is_not_taken_for_the_next_calls() -> None:
    async with running_replica(2) as replica:
        await ready(replica)
        rpc_methods.GATE.clear()
        with pytest.raises(RpcTimeoutError) as caught:
            await replica.leader.collective_rpc(
                rpc_methods.wait_for_gate, ("first",), timeout_s=0.05
            )
        late = f"{info(1)}, {info(2)}"
        assert f"no answer from {late} within its timeout of 0.05 s" in str(caught.value)
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(
                replica.leader.collective_rpc(rpc_methods.wait_for_gate, ("second",))
            )
            await settle()
            rpc_methods.GATE.set()
        assert second.result() == [f"second of {rank}" for rank in range(3)]


@PEERS
async def test_many_calls_are_in_flight_in_order(num_peers: int) -> None:
    async with running_replica(num_peers) as replica:
        await ready(replica)
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(replica.leader.collective_rpc(rpc_methods.echo, (number,)))
                for number in range(50)
            ]
        for number, call in enumerate(calls):
            assert [value[1] for value in call.result()] == [[number]] * (num_peers + 1)


async def test_a_caller_that_is_cancelled_leaves_the_channel_usable() -> None:
    async with running_replica(2) as replica:
        await ready(replica)
        rpc_methods.GATE.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(
                replica.leader.collective_rpc(rpc_methods.wait_for_gate, ("cancelled",))
            )
            await settle()
            call.cancel()
        rpc_methods.GATE.set()
        assert await replica.leader.collective_rpc(rpc_methods.rank_of) == [0, 1, 2]


async def test_a_lost_rank_ends_calls_in_flight_and_later_ones() -> None:
    async with running_replica(2) as replica:
        await ready(replica)
        rpc_methods.GATE.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(outcome(replica, rpc_methods.wait_for_gate, ("x",)))
            await settle()
            replica.kill(2)
        assert isinstance(call.result(), RankLostError)
        assert str(info(2)) in str(call.result())
        rpc_methods.GATE.set()
        assert isinstance(await outcome(replica, rpc_methods.rank_of), ReplicaFailedError)


async def outcome(replica: FakeReplica, method: Any, args: tuple[Any, ...] = ()) -> Any:
    try:
        return await replica.leader.collective_rpc(method, args)
    except (RankLostError, ReplicaFailedError) as error:
        return error


# --- what cannot travel --------------------------------------------------------------------------


@PEERS
async def test_tensors_are_refused_with_advice(num_peers: int) -> None:
    async with running_replica(num_peers) as replica:
        await ready(replica)
        for args, kwargs, name in [
            ((1, torch.ones(2)), {}, "argument 1"),
            ((), {"weights": [torch.ones(2)]}, "weights"),
        ]:
            with pytest.raises(TypeError, match=f"{name}: .*Tensor.*travel by process group"):
                await replica.leader.collective_rpc(rpc_methods.echo, args, kwargs)
        with pytest.raises(WorkerError, match="travel by process group"):
            await replica.leader.collective_rpc(rpc_methods.an_object)
        assert await replica.leader.collective_rpc(rpc_methods.rank_of, unique_reply_rank=0) == 0


@PEERS
async def test_methods_that_no_rank_knows_are_named(num_peers: int) -> None:
    async with running_replica(num_peers) as replica:
        await ready(replica)
        for method, message in {
            "nothing": "no method 'nothing' is registered",
            "no_such_module:f": "cannot find 'no_such_module:f'",
            "support.rpc_methods:nothing": "cannot find",
            "support.rpc_methods:GATE": "is no function but a Event",
        }.items():
            with pytest.raises(WorkerError, match=message):
                await replica.leader.collective_rpc(method)


class Holder:
    def method(self) -> None: ...


def make_closure(value: int) -> Any:
    def closure(worker: Any) -> int:
        return value

    return closure


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda worker: None, "<lambda> exists in this process only"),
        (make_closure(1), "closure exists in this process only"),
        (Holder().method, "is a bound method"),
        (partial(rpc_methods.echo, 1), "is a partial"),
        (Holder, "is a type"),
    ],
)
def test_what_exists_in_one_process_only_is_refused(method: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        method_name(method)


def test_names_on_the_wire() -> None:
    assert method_name("rank_info") == "rank_info"
    assert method_name(rpc_methods.echo) == "support.rpc_methods:echo"
    assert method_name(Holder.method).endswith(":Holder.method")
