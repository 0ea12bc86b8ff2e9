"""collective_rpc: one call on every rank of a replica, whatever they do with it.

One rank alone passes the same tests as several, whose messages travel in frames over TCP.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch
from support import rpc_methods
from support.mailbox import settle
from support.replicas import FakeReplica, info, request, running_replica

from aioengine.errors import RankLostError, ReplicaFailedError, RpcTimeoutError, WorkerError
from aioengine.limits import MAX_RPC_BYTES
from aioengine.messages import CallEnded, RemoteCall, ReplicaCall, ReplicaReady, Shutdown
from aioengine.rpc import decode_value, encode_arguments, method_name

PEERS = pytest.mark.parametrize("num_peers", [0, 3], ids=["one rank", "four ranks"])
CULPRITS = pytest.mark.parametrize(
    ("num_peers", "culprit"), [(0, 0), (3, 0), (3, 2)], ids=["one rank", "leader", "peer"]
)


@pytest.fixture(autouse=True)
def gate() -> Iterator[None]:
    rpc_methods.GATE.set()
    yield
    rpc_methods.GATE.set()


@asynccontextmanager
async def ready_replica(num_peers: int, **settings: Any) -> AsyncIterator[FakeReplica]:
    async with running_replica(num_peers, over_tcp=True, **settings) as replica:
        await replica.front_ends[0].next(ReplicaReady)
        yield replica


async def check_usable(replica: FakeReplica) -> None:
    """Calls and steps go on as if nothing had been."""
    values = await replica.leader.collective_rpc(rpc_methods.rank_of)
    assert values == list(range(len(replica.workers)))
    replica.front_ends[0].send(request("afterwards"))
    await replica.front_ends[0].until_finished("afterwards")


@PEERS
async def test_values_come_in_rank_order(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        values = await replica.leader.collective_rpc(
            rpc_methods.echo, (1, "two", b"three", None), {"four": [4.0, {"five": True}]}
        )
        arguments = [[1, "two", b"three", None], {"four": [4.0, {"five": True}]}]
        assert values == [[rank, *arguments] for rank in range(num_peers + 1)]


@PEERS
async def test_one_value_can_be_asked_for(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        rank = await replica.leader.collective_rpc(rpc_methods.rank_of, unique_reply_rank=num_peers)
        assert rank == num_peers
        for other in (num_peers + 1, -1):
            with pytest.raises(ValueError, match=f"unique_reply_rank {other} is not one of"):
                await replica.leader.collective_rpc("x", unique_reply_rank=other)


@CULPRITS
async def test_an_exception_on_any_rank_reaches_the_caller(num_peers: int, culprit: int) -> None:
    """Also when another rank's reply is the one asked for; and the replica goes on."""
    async with ready_replica(num_peers) as replica:
        with pytest.raises(WorkerError, match=f"rank {culprit} was told to fail") as caught:
            await replica.leader.collective_rpc(
                rpc_methods.fail_on, (culprit,), unique_reply_rank=num_peers
            )
        assert caught.value.where == f"{info(culprit)}: support.rpc_methods:fail_on"
        assert caught.value.type_name == "KeyError"
        assert "raise KeyError" in caught.value.traceback
        await check_usable(replica)


# --- order and time ------------------------------------------------------------------------------


@PEERS
async def test_a_late_reply_is_not_taken_for_the_next_calls(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        rpc_methods.GATE.clear()
        with pytest.raises(RpcTimeoutError) as caught:
            await replica.leader.collective_rpc(
                rpc_methods.wait_for_gate, ("first", num_peers), timeout_s=0.05
            )
        assert str(caught.value) == (
            "collective_rpc 'support.rpc_methods:wait_for_gate': no answer from "
            f"{info(num_peers)} within its timeout of 0.05 s"
        )
        async with asyncio.TaskGroup() as tasks:
            second = tasks.create_task(
                replica.leader.collective_rpc(rpc_methods.wait_for_gate, ("second",))
            )
            await settle()
            rpc_methods.GATE.set()
        assert second.result() == [f"second of {rank}" for rank in range(num_peers + 1)]


@PEERS
async def test_every_call_has_a_deadline_of_its_own(num_peers: int) -> None:
    """A call that waits behind another is late by itself, whatever becomes of the other."""
    async with ready_replica(num_peers) as replica:
        rpc_methods.GATE.clear()
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(
                replica.leader.collective_rpc(rpc_methods.wait_for_gate, ("first",), timeout_s=60)
            )
            await settle()
            with pytest.raises(RpcTimeoutError, match="rank_of': no answer"):
                await replica.leader.collective_rpc(rpc_methods.rank_of, timeout_s=0)
            rpc_methods.GATE.set()
        assert first.result()[num_peers] == f"first of {num_peers}"
        await check_usable(replica)


@PEERS
async def test_many_calls_of_many_callers_run_in_order(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(replica.leader.collective_rpc(rpc_methods.order_of, (number,)))
                for number in range(50)
            ]
        for number, call in enumerate(calls):
            assert call.result() == [list(range(number + 1))] * (num_peers + 1)


@PEERS
async def test_a_caller_that_is_cancelled_leaves_the_channel_usable(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        rpc_methods.GATE.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(
                replica.leader.collective_rpc(rpc_methods.wait_for_gate, ("cancelled",))
            )
            await settle()
            call.cancel()
        rpc_methods.GATE.set()
        await check_usable(replica)


@PEERS
async def test_a_call_takes_its_turn_among_steps(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        for worker in replica.workers:
            worker.gate.clear()
        replica.front_ends[0].send(request("a"))
        await replica.workers[0].entered.wait()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(replica.leader.collective_rpc(rpc_methods.rank_of))
            await settle()
            assert not call.done()
            for worker in replica.workers:
                worker.gate.set()
        assert call.result() == list(range(num_peers + 1))
        await replica.front_ends[0].until_finished("a")


# --- the end -------------------------------------------------------------------------------------


async def test_a_lost_rank_ends_calls_in_flight_and_later_ones() -> None:
    async with ready_replica(2) as replica:
        rpc_methods.GATE.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(outcome(replica, rpc_methods.wait_for_gate, ("x",)))
            await settle()
            replica.kill(2)
        assert isinstance(call.result(), RankLostError)
        assert str(info(2)) in str(call.result())
        rpc_methods.GATE.set()
        later = await outcome(replica, rpc_methods.rank_of)
        assert isinstance(later, ReplicaFailedError)
        assert str(later) == str(call.result())


@PEERS
async def test_an_orderly_end_ends_calls_in_flight_and_later_ones(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        rpc_methods.GATE.clear()
        async with asyncio.TaskGroup() as tasks:
            call = tasks.create_task(outcome(replica, rpc_methods.wait_for_gate, ("x",)))
            await settle()
            replica.front_ends[0].send(Shutdown())
        rpc_methods.GATE.set()
        later = await outcome(replica, rpc_methods.rank_of)
        for error in (call.result(), later):
            assert isinstance(error, ReplicaFailedError)
            assert "has been shut down" in str(error)
        assert await replica.outcomes[0] is None


async def outcome(replica: FakeReplica, method: Any, args: tuple[Any, ...] = ()) -> Any:
    try:
        return await replica.leader.collective_rpc(method, args)
    except (RankLostError, ReplicaFailedError) as error:
        return error


# --- whatever a method does ----------------------------------------------------------------------


@CULPRITS
@pytest.mark.parametrize(
    ("kind", "type_name", "message"),
    [
        ("exit", "SystemExit", "3"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("stop", "StopIteration", "1"),
        ("huge", "ValueError", "xxx"),
        ("surrogate", "ValueError", r"name \udcff"),
        ("unreadable", "UnreadableError", "its text cannot be made"),
    ],
)
async def test_whatever_a_method_raises_ends_the_call_only(
    num_peers: int, culprit: int, kind: str, type_name: str, message: str
) -> None:
    async with ready_replica(num_peers) as replica:
        with pytest.raises(WorkerError) as caught:
            await replica.leader.collective_rpc(rpc_methods.raise_on, (culprit, kind))
        assert caught.value.type_name == type_name
        assert message in caught.value.message
        assert len(caught.value.message) + len(caught.value.traceback) < 2**14
        assert "raise_on" in caught.value.traceback
        await check_usable(replica)


@CULPRITS
async def test_a_method_without_end_is_an_error(num_peers: int, culprit: int) -> None:
    async with ready_replica(num_peers) as replica:
        with pytest.raises(WorkerError, match="RecursionError"):
            await replica.leader.collective_rpc(rpc_methods.overflow_on, (culprit,))
        await check_usable(replica)


@CULPRITS
@pytest.mark.parametrize("kind", rpc_methods.VALUES)
async def test_a_value_that_cannot_travel_is_an_error(
    num_peers: int, culprit: int, kind: str
) -> None:
    async with ready_replica(num_peers) as replica:
        with pytest.raises(WorkerError, match=r"the value of .*return_on: "):
            await replica.leader.collective_rpc(rpc_methods.return_on, (culprit, kind))
        await check_usable(replica)


@CULPRITS
async def test_a_value_that_cannot_be_read_is_an_error(num_peers: int, culprit: int) -> None:
    async with ready_replica(num_peers) as replica:
        with pytest.raises(WorkerError, match="the value cannot be read") as caught:
            await replica.leader.collective_rpc(rpc_methods.malformed_on, (culprit,))
        assert str(info(culprit)) in str(caught.value)
        await check_usable(replica)


@PEERS
async def test_plain_values_of_every_kind_travel(num_peers: int) -> None:
    values = [float("inf"), -0.0, b"\xff\0", 2**64 - 1, -(2**63), "é\0", {"a": {"b": []}}, [[]]]
    async with ready_replica(num_peers) as replica:
        (echoed, *_) = await replica.leader.collective_rpc(rpc_methods.echo, values)
        assert echoed == [0, values, {}]
        assert repr(echoed[1][1]) == "-0.0"
        (echoed, *_) = await replica.leader.collective_rpc(rpc_methods.echo, (float("nan"),))
        assert echoed[1][0] != echoed[1][0]


@PEERS
async def test_a_value_nests_as_deep_as_msgpack_allows(num_peers: int) -> None:
    """Wherever along the way the limit is: only the call ends."""
    async with ready_replica(num_peers) as replica:
        for depth in (*range(900, 1010, 2), 3000):
            try:
                await replica.leader.collective_rpc(rpc_methods.nested_list, (depth,))
            except WorkerError as error:
                assert "recursion" in str(error)  # noqa: PT017
            ended = await ended_call(replica, rpc_methods.nested_list, depth)
            assert not ended.message or "recursion" in ended.message
        await check_usable(replica)


@PEERS
async def test_a_value_is_as_large_as_a_frame_allows(num_peers: int) -> None:
    room = MAX_RPC_BYTES - 5  # msgpack's head of a long bytes value
    async with ready_replica(num_peers) as replica:
        values = await replica.leader.collective_rpc(rpc_methods.some_bytes, (room,))
        assert [len(value) for value in values] == [room] * (num_peers + 1)
        with pytest.raises(WorkerError, match=f"{MAX_RPC_BYTES + 1} bytes, the limit is"):
            await replica.leader.collective_rpc(rpc_methods.some_bytes, (room + 1,))
        largest = bytes(room - 3)  # beside the heads of (args, kwargs)
        await replica.leader.collective_rpc(rpc_methods.length_of, (largest,), unique_reply_rank=0)
        with pytest.raises(TypeError, match=f"the arguments: {MAX_RPC_BYTES + 1} bytes"):
            await replica.leader.collective_rpc(rpc_methods.length_of, (largest + b"x",))
        await check_usable(replica)


@PEERS
async def test_what_a_front_end_asks_for_is_as_large_as_a_frame_allows(num_peers: int) -> None:
    """It gets the values of all ranks in one frame."""
    async with ready_replica(num_peers) as replica:
        share = MAX_RPC_BYTES // (num_peers + 1)
        ended = await ended_call(replica, rpc_methods.some_bytes, share - 8)
        assert [len(value) for value in decode_value(ended.value)] == [share - 8] * (num_peers + 1)
        ended = await ended_call(replica, rpc_methods.some_bytes, share)
        assert f"the limit is {MAX_RPC_BYTES}" in ended.message
        await check_usable(replica)


async def ended_call(replica: FakeReplica, method: Any, *args: Any) -> CallEnded:
    """What a front end gets for its call."""
    call = RemoteCall(method_name(method), encode_arguments(args, {}))
    replica.front_ends[0].send(ReplicaCall(0, call, None))
    return await replica.front_ends[0].next(CallEnded)


# --- what cannot travel --------------------------------------------------------------------------


@PEERS
async def test_tensors_are_refused_with_advice(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        for args, kwargs, name in [
            ((1, torch.ones(2)), {}, "argument 1"),
            ((), {"weights": [torch.ones(2)]}, "weights"),
        ]:
            with pytest.raises(TypeError, match=f"{name}: .*Tensor.*travel by process group"):
                await replica.leader.collective_rpc(rpc_methods.echo, args, kwargs)
        await check_usable(replica)


@PEERS
async def test_arguments_that_cannot_travel_are_refused(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        for make in rpc_methods.VALUES.values():
            with pytest.raises(TypeError, match="argument 0"):
                await replica.leader.collective_rpc(rpc_methods.echo, (make(),))
        for name in ("a\udcff", "x" * 1000):
            with pytest.raises(ValueError, match="method"):
                await replica.leader.collective_rpc(name)
        await check_usable(replica)


@PEERS
async def test_methods_that_no_rank_knows_are_named(num_peers: int) -> None:
    async with ready_replica(num_peers) as replica:
        for method, message in {
            "nothing": "no method 'nothing' is registered",
            "no_such_module:f": "cannot find 'no_such_module:f'",
            "support.rpc_methods:nothing": "cannot find",
            "support.rpc_methods:GATE": "is no function but a Event",
            ":f": "cannot find ':f'",
            "support.rpc_methods:": "cannot find",
        }.items():
            with pytest.raises(WorkerError, match=message):
                await replica.leader.collective_rpc(method)


class Holder:
    def method(self) -> None: ...


def make_closure(value: int) -> Any:
    def closure(worker: Any) -> int:
        return value

    return closure


named_lambda = lambda worker: None  # noqa: E731


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (lambda worker: None, "<lambda> exists in this process only"),
        (named_lambda, "<lambda> exists in this process only"),
        (make_closure(1), "closure exists in this process only"),
        (rpc_methods.decorate(rpc_methods.rank_of), "is not what .*:rank_of stands for"),
        (Holder().method, "is a bound method"),
        (partial(rpc_methods.echo, 1), "is a partial"),
        (Holder, "is a type"),
        (rpc_methods.suspends, "is async"),
    ],
)
def test_what_exists_in_one_process_only_is_refused(method: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        method_name(method)


def test_names_on_the_wire() -> None:
    assert method_name("rank_info") == "rank_info"
    assert method_name(rpc_methods.echo) == "support.rpc_methods:echo"
    assert method_name(rpc_methods.decorated_rank_of) == "support.rpc_methods:decorated_rank_of"
