"""/collective_rpc and /reset_prefix_cache: under the admin key only, and true about what failed."""

import asyncio
from typing import Any

import msgspec
import pytest
from support.http_server import Answer, Served, serving
from support.mailbox import settle

from aioengine.limits import MAX_RPC_BYTES
from aioengine.messages import CallEnded, ReplicaCall, ResetPrefixCache
from aioengine.rpc import decode_arguments, encode_value

KEY = "open sesame"
DEEP = b"\x91" * 5000 + b"\x90"
HEADERS = {"Authorization": f"Bearer {KEY}"}
RPC = "/collective_rpc"
RESET = "/reset_prefix_cache"


async def answered(
    served: Served, path: str, body: Any, kind: type[Any], *endings: dict[str, Any]
) -> Answer:
    """Each leader in turn gets an ending for the call that reaches it."""
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(served.post(path, body, headers=HEADERS))
        for leader, ending in zip(served.leaders, endings, strict=True):
            command = await leader.next(kind)
            leader.send(CallEnded(command.call_id, **ending))
    return asking.result()


@pytest.mark.parametrize("path", [RPC, RESET])
async def test_without_a_configured_key_it_is_refused(path: str) -> None:
    async with serving(api_key=("other",)) as served:
        answer = await served.post(path, {}, headers={"Authorization": "Bearer other"})
        assert answer.status == 403
        assert "--admin-api-key" in answer.error["message"]


@pytest.mark.parametrize("path", [RPC, RESET])
@pytest.mark.parametrize("given", [None, "", "Bearer ", "Bearer other", f"Bearer {KEY}s", KEY])
async def test_only_the_admin_key_opens(path: str, given: str | None) -> None:
    async with serving(admin_api_key=KEY, api_key=("other",)) as served:
        headers = {} if given is None else {"Authorization": given}
        answer = await served.post(path, {"method": "rank_info"}, headers=headers)
        assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert not served.leader.of(ReplicaCall)
        assert not served.leader.of(ResetPrefixCache)


async def test_the_admin_key_is_not_the_api_key() -> None:
    async with serving(admin_api_key=KEY, api_key=("other",)) as served:
        assert (await served.get("/v1/models", headers=HEADERS)).status == 401


async def test_values_of_all_ranks_replica_by_replica() -> None:
    async with serving(states=("ready", "ready"), admin_api_key=KEY) as served:
        body = {"method": "rank_info", "args": [1, "a"], "kwargs": {"b": None}, "timeout": 2.5}
        endings = [{"value": encode_value(values, "")} for values in (["a", "b"], ["c", "d"])]
        answer = await answered(served, RPC, body, ReplicaCall, *endings)
        assert (answer.status, answer.json) == (200, {"results": ["a", "b", "c", "d"]})
        (command,) = served.leader.of(ReplicaCall)
        assert command.timeout_s == 2.5
        assert command.call.method == "rank_info"
        assert command.call.registered_only
        assert decode_arguments(command.call.arguments) == ([1, "a"], {"b": None})


async def test_one_value_of_each_replica() -> None:
    async with serving(admin_api_key=KEY) as served:
        body = {"method": "rank_info", "unique_reply_rank": 0}
        answer = await answered(
            served, RPC, body, ReplicaCall, {"value": encode_value({"rank": 0}, "")}
        )
        assert answer.json == {"results": [{"rank": 0}]}
        assert served.leader.of(ReplicaCall)[0].call.reply_rank == 0


@pytest.mark.parametrize(
    ("where", "error_type", "status", "param"),
    [
        ("rank 3: m", "UnknownMethodError", 404, "method"),
        ("rank 3: m", "KeyError", 500, None),
        ("", "RpcTimeoutError", 504, "timeout"),
        ("", "RankLostError", 503, None),
        ("", "ReplicaFailedError", 503, None),
    ],
)
async def test_errors_name_their_cause(
    where: str, error_type: str, status: int, param: str | None
) -> None:
    async with serving(admin_api_key=KEY) as served:
        ending = {"message": "it was so", "error_type": error_type, "where": where}
        answer = await answered(served, RPC, {"method": "m"}, ReplicaCall, ending)
        assert answer.status == status
        assert answer.error["param"] == param
        cause = f"{where}: {error_type}: it was so" if where else "it was so"
        assert answer.error["message"] == cause


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float("nan"), None),
        (b"\0\xff", "AP8="),
        ({2: "two"}, {"2": "two"}),
        (2**64 - 1, 2**64 - 1),
    ],
)
async def test_values_that_json_says_differently(value: Any, shown: Any) -> None:
    async with serving(admin_api_key=KEY) as served:
        answer = await answered(
            served, RPC, {"method": "m"}, ReplicaCall, {"value": encode_value([value], "")}
        )
        assert (answer.status, answer.json) == (200, {"results": [shown]})


@pytest.mark.parametrize(
    "value",
    [encode_value([{None: 1}], ""), encode_value([msgspec.msgpack.Ext(1, b"")], ""), DEEP, b"\xc1"],
    ids=["key", "extension", "deep", "malformed"],
)
async def test_values_that_cannot_be_answered_end_the_call_only(value: bytes) -> None:
    async with serving(admin_api_key=KEY) as served:
        answer = await answered(served, RPC, {"method": "m"}, ReplicaCall, {"value": value})
        assert (answer.status, answer.error["code"]) == (500, "method_failed")
        assert "cannot be" in answer.error["message"]
        answer = await answered(
            served, RPC, {"method": "m"}, ReplicaCall, {"value": encode_value([1], "")}
        )
        assert answer.json == {"results": [1]}


async def test_a_drain_waits_for_calls_in_flight_and_refuses_others() -> None:
    async with serving(admin_api_key=KEY) as served:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(served.post(RPC, {"method": "m"}, headers=HEADERS))
            command = await served.leader.next(ReplicaCall)
            served.front_end.begin_drain()
            assert not served.front_end.idle.is_set()
            refused = await served.post(RPC, {"method": "m"}, headers=HEADERS)
            assert (refused.status, refused.error["code"]) == (503, "draining")
            served.leader.send(CallEnded(command.call_id, encode_value(["done"], "")))
            await served.front_end.idle.wait()
        assert asking.result().json == {"results": ["done"]}


async def test_the_end_of_a_drain_ends_calls_with_an_error() -> None:
    async with serving(admin_api_key=KEY) as served:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(served.post(RPC, {"method": "m"}, headers=HEADERS))
            await served.leader.next(ReplicaCall)
            served.front_end.end_calls("the server is shutting down")
        assert asking.result().status == 503
        assert "shutting down" in asking.result().error["message"]


async def test_a_replica_that_fails_meanwhile_ends_the_call() -> None:
    async with serving(states=("ready", "ready"), admin_api_key=KEY) as served:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(served.post(RPC, {"method": "m"}, headers=HEADERS))
            command = await served.leaders[0].next(ReplicaCall)
            served.leaders[0].send(CallEnded(command.call_id, encode_value([], "")))
            await served.leaders[1].next(ReplicaCall)
            served.leaders[1].fail("rank 5 died")
        assert asking.result().status == 503
        assert "rank 5 died" in asking.result().error["message"]
        again = await served.post(RPC, {"method": "m"}, headers=HEADERS)
        assert again.status == 503


async def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    async with serving(admin_api_key=KEY) as served:
        served.leader.send(CallEnded(77, encode_value("late", "")))
        await settle()
        answer = await answered(
            served, RPC, {"method": "m"}, ReplicaCall, {"value": encode_value(["mine"], "")}
        )
        assert answer.json == {"results": ["mine"]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "method"),
        ({"method": 3}, "method"),
        ({"method": "m" * 257}, "method"),
        ({"method": "m", "timeout": 0}, "timeout"),
        ({"method": "m", "timeout": "x"}, "timeout"),
        ({"method": "m", "unique_reply_rank": -1}, "unique_reply_rank"),
        ({"method": "m", "unique_reply_rank": 1}, "unique_reply_rank"),
        ({"method": "m", "args": {}}, "args"),
        ({"method": "m", "kwargs": []}, "kwargs"),
        ({"method": "m", "args": ["x" * MAX_RPC_BYTES]}, "args"),
    ],
)
async def test_bad_bodies_name_the_field(body: dict[str, Any], param: str) -> None:
    async with serving(admin_api_key=KEY) as served:
        answer = await served.post(RPC, msgspec.json.encode(body), headers=HEADERS)
        assert (answer.status, answer.error["param"]) == (400, param)


async def test_the_prefix_cache_of_every_replica_is_reset() -> None:
    async with serving(states=("ready", "ready"), admin_api_key=KEY) as served:
        nothing = {"value": encode_value(None, "")}
        answer = await answered(served, RESET, None, ResetPrefixCache, nothing, nothing)
        assert (answer.status, answer.json) == (200, {"status": "ok"})
