"""POST /collective_rpc and /reset_prefix_cache, under the admin key."""

from functools import partial
from typing import Any

from aiohttp import web

from aioengine.api.context import API
from aioengine.api.decoding import decode_body
from aioengine.api.errors import ApiError, invalid
from aioengine.api.outputs import json_response
from aioengine.api.schema import RpcBody
from aioengine.errors import EngineError, RpcTimeoutError, WorkerError
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.replica_calls import MakeCommand
from aioengine.messages import RemoteCall, ReplicaCall, ResetPrefixCache
from aioengine.rpc import UnknownMethodError, encode_arguments


async def collective_rpc(request: web.Request) -> web.Response:
    """`results`: of all ranks, replica by replica, or of one rank of each (`unique_reply_rank`)."""
    api = request.app[API]
    body = decode_body(await request.read(), RpcBody)
    api.served()
    num_ranks = api.layout.world_size
    if body.unique_reply_rank is not None and body.unique_reply_rank >= num_ranks:
        raise invalid(
            f"unique_reply_rank {body.unique_reply_rank} is not one of the {num_ranks} ranks of a "
            "replica",
            "unique_reply_rank",
        )
    try:
        arguments = encode_arguments(body.args, body.kwargs)
    except TypeError as error:
        raise invalid(str(error), "args") from None
    call = RemoteCall(body.method, arguments, body.unique_reply_rank, registered_only=True)
    make_call = partial(ReplicaCall, call=call, timeout_s=body.timeout)
    results = await _call(api.front_end, make_call)
    if body.unique_reply_rank is None:
        results = [value for values in results for value in values]
    try:
        return json_response({"results": results})
    except (TypeError, RecursionError) as error:
        message = f"{body.method}: its values cannot be written as JSON: {error}"
        raise ApiError(500, message, code="method_failed") from None


async def reset_prefix_cache(request: web.Request) -> web.Response:
    api = request.app[API]
    api.served()
    await _call(api.front_end, ResetPrefixCache)
    return json_response({"status": "ok"})


async def _call(front_end: FrontEnd, make_command: MakeCommand) -> list[Any]:
    try:
        return await front_end.call_replicas(make_command)
    except RpcTimeoutError as error:
        raise ApiError(504, str(error), param="timeout", code="timeout") from None
    except WorkerError as error:
        if error.type_name == UnknownMethodError.__name__:
            raise ApiError(404, str(error), param="method", code="method_not_found") from None
        raise ApiError(500, str(error), code="method_failed") from None
    except EngineError as error:  # a rank or the replica is lost
        raise ApiError(503, str(error), code="replica_failed") from None
