"""GET /trace/state, /trace/stacks and /trace/steps, under the admin key: what every rank is in.

Answered in every state of the engine: what is starting, stuck or half dead is what one asks about.
"""

import re
import time
from collections.abc import Iterable
from itertools import chain
from typing import Any

from aiohttp import web

from aioengine.api.context import API, Api
from aioengine.api.errors import ApiError, invalid
from aioengine.api.outputs import json_response
from aioengine.frontend.tracer import RecordingError
from aioengine.handshake_messages import Member
from aioengine.limits import MAX_RECORDED_SECONDS, MAX_RECORDED_STEPS
from aioengine.messages import Heartbeat
from aioengine.trace_messages import (
    DEFAULT_RECORDED_SECONDS,
    DEFAULT_RECORDED_STEPS,
    AskStacks,
    AskState,
    HeardBeat,
    LoopBlock,
    RankStacks,
    RankState,
    ThreadStack,
)


async def state(request: web.Request) -> web.Response:
    """Step, queue, last collective, loop lag and more of every rank, and who does not answer."""
    api = request.app[API]
    heard = list(_beats_of_leaders(api))
    asked_at = time.monotonic()
    answers = await api.tracer.ask(AskState())
    waited_s = time.monotonic() - asked_at
    for answer in answers:
        heard += answer.heard if isinstance(answer, RankState) else ()
    ranks = []
    for member, answer in zip(api.tracer.members, answers, strict=True):
        entry = _who(api, member)
        if isinstance(answer, RankState):
            entry |= _state(answer)
        else:
            last = _last(heard, member.info.rank, waited_s)
            entry |= {"error": str(answer), "last_heartbeat": last}
        ranks.append(entry)
    return json_response({"status": api.front_end.health, "ranks": ranks})


async def stacks(request: web.Request) -> web.Response:
    """Every thread of every rank, and where the rank was when its loop was blocked last."""
    api = request.app[API]
    ranks = []
    for member, answer in zip(api.tracer.members, await api.tracer.ask(AskStacks()), strict=True):
        entry = _who(api, member)
        if isinstance(answer, RankStacks):
            entry |= {"threads": _threads(answer.threads), "loop_block": _block(answer.block)}
        else:
            entry["error"] = str(answer)
        ranks.append(entry)
    return json_response({"status": api.front_end.health, "ranks": ranks})


async def steps(request: web.Request) -> web.Response:
    """What the ranks of one replica, or of all, did in the next `steps` steps; waits for them, at
    most `seconds`. Spans are as `timeline/recorder.py` writes them; `aioengine trace steps` makes a
    Chrome trace of them."""
    api = request.app[API]
    num_steps = _number(request, "steps", DEFAULT_RECORDED_STEPS, MAX_RECORDED_STEPS)
    limit_s = _number(request, "seconds", DEFAULT_RECORDED_SECONDS, MAX_RECORDED_SECONDS)
    members = _members_by_replica(api, request.query.get("replica"))
    try:
        replicas = await api.tracer.record(members, num_steps, limit_s)
    except RecordingError as error:
        raise ApiError(409, str(error), code="recording") from None
    ranks = []
    for member, found in zip(chain(*members), chain(*replicas), strict=True):
        entry = _who(api, member)
        if isinstance(found, str):
            entry["error"] = found
        else:
            entry |= {"first_seq": found.first_seq, "clock": found.clock}
            entry["recorded"] = found.recorded
        ranks.append(entry)
    asked = {"steps": num_steps, "seconds": limit_s}
    return json_response({"status": api.front_end.health, **asked, "ranks": ranks})


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    text = request.query.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text) or not 1 <= int(text) <= most:
        raise invalid(f"{name} must be a whole number from 1 to {most}, got {text!r}", name)
    return int(text)


def _members_by_replica(api: Api, replica: str | None) -> list[list[Member]]:
    """Of all replicas, or of the one that was asked for."""
    by_replica: list[list[Member]] = [[] for _ in api.front_end.replicas]
    for member in api.tracer.members:
        by_replica[api.layout.coords(member.info.rank).dp].append(member)
    if replica is None:
        return by_replica
    if replica not in map(str, range(len(by_replica))):
        raise invalid(
            f"there is no replica {replica!r}: there are {len(by_replica)}, from 0 on", "replica"
        )
    return [by_replica[int(replica)]]


def _who(api: Api, member: Member) -> dict[str, Any]:
    info = member.info
    replica = api.front_end.replicas[api.layout.coords(info.rank).dp]
    replica_state = "failed" if replica.failed_cause else "ready" if replica.ready else "starting"
    return {
        "rank": info.rank,
        "coords": info.coords,
        "host": info.host,
        "pid": info.pid,
        "replica": replica_state,
        "error": None,
    }


def _state(answer: RankState) -> dict[str, Any]:
    return {
        **_pulse(answer.pulse, 0.0),
        "last_operation": answer.last_operation or None,
        "num_queued": answer.num_queued,
        "num_requests_running": answer.num_running,
        "num_requests_waiting": answer.num_waiting,
        "loop_lag_seconds": answer.loop_lag_s,
        "max_loop_lag_seconds": answer.max_loop_lag_s,
        "rss_bytes": answer.rss_bytes,
        "num_fds": answer.num_fds,
        "num_threads": answer.num_threads,
        "uptime_seconds": answer.uptime_s,
    }


def _pulse(beat: Heartbeat, age_s: float) -> dict[str, Any]:
    return {
        "last_step": beat.last_seq,
        "doing": beat.doing,
        "operation": beat.operation or None,
        "doing_seconds": beat.doing_s + age_s,
    }


def _beats_of_leaders(api: Api) -> Iterable[HeardBeat]:
    now = time.monotonic()
    for replica in api.front_end.replicas:
        if replica.beat is not None:
            yield HeardBeat(replica.leader.rank, replica.beat, now - replica.beat_at)


def _last(heard: list[HeardBeat], rank: int, waited_s: float) -> dict[str, Any] | None:
    """The youngest heartbeat of a rank that anybody has got, as it was `waited_s` ago."""
    beats = [beat for beat in heard if beat.rank == rank]
    if not beats:
        return None
    last = min(beats, key=lambda beat: beat.age_s)
    return {"seconds_ago": last.age_s + waited_s, **_pulse(last.beat, 0.0)}


def _block(block: LoopBlock | None) -> dict[str, Any] | None:
    if block is None:
        return None
    return {
        "is_over": block.is_over,
        "lasted_seconds": block.lasted_s,
        "ended_seconds_ago": block.ended_s_ago if block.is_over else None,
        "threads": _threads(block.stacks),
    }


def _threads(stacks: Iterable[ThreadStack]) -> list[dict[str, str]]:
    return [{"thread": stack.thread, "stack": stack.stack} for stack in stacks]
