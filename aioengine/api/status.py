"""Health, readiness, versions, the rank grid and models."""

from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from aiohttp import web
from msgspec import UNSET

from aioengine.api.answers import ModelCard, ModelList, Status, TokenizerInfo, Version
from aioengine.api.context import API, Api
from aioengine.api.errors import RETRY_AFTER_S, ApiError
from aioengine.api.outputs import json_response
from aioengine.api.prompts import context_of
from aioengine.frontend.front_end import Replica

VERSION = version("aioengine")


async def livez(request: web.Request) -> web.Response:
    """The process answers."""
    return json_response(Status(status="alive"))


async def readyz(request: web.Request) -> web.Response:
    """New requests are served."""
    health = request.app[API].front_end.health
    return _with_status(200 if health in ("ok", "degraded") else 503, Status(status=health))


async def health(request: web.Request) -> web.Response:
    """The engine behind the process: never 200 over a dead one."""
    front_end = request.app[API].front_end
    state = front_end.health
    causes = [*front_end.causes, *filter(None, [front_end.drain_cause])]
    body = Status(status=state, causes=causes or UNSET)
    return _with_status(503 if state in ("starting", "failed") else 200, body)


def _with_status(status: int, body: Status) -> web.Response:
    response = json_response(body)
    response.set_status(status)
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


async def server_version(request: web.Request) -> web.Response:
    return json_response(Version(VERSION))


async def models(request: web.Request) -> web.Response:
    return json_response(ModelList([_model_card(request.app[API])]))


async def one_model(request: web.Request) -> web.Response:
    card = _model_card(request.app[API])
    name = request.match_info["name"]
    if name != card.id:
        raise ApiError(404, f"the model {name[:64]!r} does not exist", code="model_not_found")
    return json_response(card)


def _model_card(api: Api) -> ModelCard:
    return ModelCard(id=api.served().name, created=api.started_at, max_model_len=context_of(api))


async def tokenizer_info(request: web.Request) -> web.Response:
    api = request.app[API]
    model = api.served()
    tokenizer = model.tokenizer
    return json_response(
        TokenizerInfo(
            vocab_size=model.config.vocab_size,
            bos_token=tokenizer.bos_token,
            bos_token_id=tokenizer.bos_token_id,
            eos_token=tokenizer.eos_token,
            eos_token_id=tokenizer.eos_token_id,
            eos_token_ids=list(model.eos_token_ids),
            add_bos_token=tokenizer.add_bos,
            chat_template=model.template.source,
            max_model_len=context_of(api),
        )
    )


async def server_info(request: web.Request) -> web.Response:
    """The grid: who every rank is and how far it is."""
    api = request.app[API]
    return json_response(
        {
            "version": VERSION,
            "status": api.front_end.health,
            "model": api.model.name if api.model else None,
            "max_model_len": api.front_end.max_model_len,
            "restart_count": api.front_end.restart_count,
            "sizes": {
                name.removesuffix("_size"): size for name, size in asdict(api.layout).items()
            },
            "world_size": api.layout.world_size,
            "launch_world_size": api.layout.launch_world_size,
            "replicas": [_replica(replica) for replica in api.front_end.replicas],
        }
    )


def _replica(replica: Replica) -> dict[str, Any]:
    state, stats, ready = replica.state, replica.stats, replica.ready
    return {
        "dp_rank": replica.dp_rank,
        "state": state,
        "cause": replica.failed_cause,
        "last_step": stats.last_seq,
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "num_kv_blocks": ready.num_blocks if ready else None,
        "num_free_kv_blocks": stats.num_free_blocks if stats.num_blocks else None,
        "block_size": ready.block_size if ready else None,
        "ranks": [
            {
                "rank": info.rank,
                "coords": info.coords,
                "host": info.host,
                "pid": info.pid,
                "state": state,
                "last_step": stats.last_seq,
            }
            for info in (ready.ranks if ready else ())
        ],
    }
