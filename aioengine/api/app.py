"""Routes, and what every request passes through."""

import logging
from typing import Final

from aiohttp import hdrs, web

from aioengine import limits
from aioengine.api import admin, status, tokens, trace
from aioengine.api.access import ADMIN_KEYS, KEYS, Keys, answer_preflight, check_key
from aioengine.api.bodies import BODIES, BodyBudget, read_body
from aioengine.api.chat import chat_completions
from aioengine.api.completions import completions
from aioengine.api.context import API, Api
from aioengine.api.errors import ApiError, invalid
from aioengine.api.handlers import Handler, route_of
from aioengine.api.metrics import HTTP_METRICS, HttpMetrics, count_requests, metrics
from aioengine.api.openapi import openapi
from aioengine.api.request_log import REQUEST_ID, add_headers, name_and_log
from aioengine.frontend.sampling import InvalidFieldError

log = logging.getLogger(__name__)

TEXT: Final = frozenset({"/tokenize", "/detokenize", "/tokenizer_info"})
GENERATING: Final = frozenset({"/v1/completions", "/v1/chat/completions"})


def build_app(api: Api) -> web.Application:
    root = api.config.root_path
    app = web.Application(
        client_max_size=limits.MAX_BODY_BYTES,
        middlewares=[
            count_requests,
            name_and_log,
            shape_errors,
            answer_preflight,
            check_key,
            check_serving,
            read_body,
        ],
    )
    app[API] = api
    app[KEYS] = Keys(api.config.api_key)
    app[ADMIN_KEYS] = Keys(filter(None, [api.config.admin_api_key]))
    app[BODIES] = BodyBudget()
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.get(f"{root}/livez", status.livez),
            web.get(f"{root}/readyz", status.readyz),
            web.get(f"{root}/health", status.health),
            web.get(f"{root}/version", status.server_version),
            web.get(f"{root}/server_info", status.server_info),
            web.get(f"{root}/metrics", metrics),
            web.get(f"{root}/openapi.json", openapi),
            web.get(f"{root}/tokenizer_info", status.tokenizer_info),
            web.get(f"{root}/v1/models", status.models),
            web.get(root + "/v1/models/{name:.+}", status.one_model),
            web.post(f"{root}/v1/completions", completions),
            web.post(f"{root}/v1/chat/completions", chat_completions),
            web.post(f"{root}/tokenize", tokens.tokenize),
            web.post(f"{root}/detokenize", tokens.detokenize),
            web.post(f"{root}/collective_rpc", admin.collective_rpc),
            web.post(f"{root}/reset_prefix_cache", admin.reset_prefix_cache),
            web.get(f"{root}/trace/state", trace.state),
            web.get(f"{root}/trace/stacks", trace.stacks),
            web.get(f"{root}/trace/steps", trace.steps),
        ]
    )
    routes = (resource.canonical.removeprefix(root) for resource in app.router.resources())
    app[HTTP_METRICS] = HttpMetrics(routes)
    return app


@web.middleware
async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves in OpenAI's form."""
    try:
        return await handler(request)
    except ApiError as error:
        request.app[HTTP_METRICS].count_refusal(error)
        return error.response()
    except InvalidFieldError as error:
        return invalid(str(error), error.field, error.code).response()
    except web.HTTPException as error:
        shaped = ApiError(error.status, _http_message(request, error)).response()
        if isinstance(error, web.HTTPMethodNotAllowed):
            shaped.headers[hdrs.ALLOW] = ", ".join(sorted(error.allowed_methods))
        return shaped
    except web.RequestPayloadError:
        return ApiError(400, "the body's encoding or framing is broken").response()
    except ConnectionError:
        raise  # the client has left; there is nobody to answer
    except Exception:
        log.exception("%s: %s %s failed", request[REQUEST_ID], request.method, route_of(request))
        return ApiError(500, "internal error; the server's log has the details").response()


def _http_message(request: web.Request, error: web.HTTPException) -> str:
    match error.status:
        case 404:
            return f"there is no route {request.path}"
        case 405:
            return f"{request.path} does not take {request.method}"
        case 413:
            return f"the body is larger than {limits.MAX_BODY_BYTES} bytes"
        case _:
            return error.text or error.reason


@web.middleware
async def check_serving(request: web.Request, handler: Handler) -> web.StreamResponse:
    """503 with Retry-After while the engine takes no work, whatever the body."""
    route = route_of(request) or ""
    if route.startswith("/v1/") or route in TEXT:
        request.app[API].served()
    if route in GENERATING:
        request.app[API].check_room()
    return await handler(request)
