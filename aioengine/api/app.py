"""Routes, middleware and the HTTP server."""

import asyncio
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from aioengine import limits
from aioengine.api import admin, status, tokens, trace
from aioengine.api.chat import chat_completions
from aioengine.api.completions import completions
from aioengine.api.context import API, Api
from aioengine.api.errors import ApiError, invalid
from aioengine.errors import StartupError
from aioengine.frontend.sampling import InvalidFieldError

log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

ALWAYS_OPEN = frozenset({"/livez", "/readyz", "/health"})
ANY_ADDRESS = frozenset({"0.0.0.0", "::"})
ADMIN = frozenset(
    {"/collective_rpc", "/reset_prefix_cache", "/trace/state", "/trace/stacks", "/trace/steps"}
)
CLOSE_GRACE_S = 2.0
"""For handlers that are still writing when the server closes."""


def build_app(api: Api) -> web.Application:
    root = api.config.root_path
    app = web.Application(
        client_max_size=limits.MAX_BODY_BYTES, middlewares=[shape_errors, check_key, check_serving]
    )
    app[API] = api
    app.add_routes(
        [
            web.get(f"{root}/livez", status.livez),
            web.get(f"{root}/readyz", status.readyz),
            web.get(f"{root}/health", status.health),
            web.get(f"{root}/version", status.server_version),
            web.get(f"{root}/server_info", status.server_info),
            web.get(f"{root}/metrics", status.metrics),
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
    return app


@web.middleware
async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error leaves in OpenAI's form."""
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except InvalidFieldError as error:
        return invalid(str(error), error.field, error.code).response()
    except web.HTTPException as error:
        shaped = ApiError(error.status, _http_message(request, error)).response()
        if isinstance(error, web.HTTPMethodNotAllowed):
            shaped.headers["Allow"] = error.headers["Allow"]
        return shaped
    except web.RequestPayloadError:
        return ApiError(400, "the body's encoding or framing is broken").response()
    except ConnectionError:
        raise  # the client has left; there is nobody to answer
    except Exception:
        log.exception("%s %s failed", request.method, request.path)
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
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The API key, where one is set; the admin key for what changes the engine. Routes are closed
    unless they are listed as open."""
    config = request.app[API].config
    path = request.path.removeprefix(config.root_path)
    is_open = path in ALWAYS_OPEN or (path == "/metrics" and not config.metrics_require_key)
    if path in ADMIN:
        if config.admin_api_key is None:
            raise ApiError(403, f"{path} needs a server started with --admin-api-key")
        _check(request, config.admin_api_key, "the admin key is missing or wrong")
    elif config.api_key is not None and not is_open:
        _check(request, config.api_key, "the API key is missing or wrong")
    return await handler(request)


def _check(request: web.Request, key: str, complaint: str) -> None:
    """In a time that does not tell how much of the key was right."""
    given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
    if not hmac.compare_digest(given, f"Bearer {key}".encode()):
        raise ApiError(401, complaint, code="invalid_api_key")


@web.middleware
async def check_serving(request: web.Request, handler: Handler) -> web.StreamResponse:
    """503 with Retry-After while the engine takes no work, whatever the body."""
    path = request.path.removeprefix(request.app[API].config.root_path)
    if path.startswith("/v1/") or path in ("/tokenize", "/detokenize"):
        request.app[API].served()
    return await handler(request)


class HttpServer:
    """The listening server of one front end. Owns its socket and the endpoint file.

    With `--api-ranks leaders` front ends are told apart by their DP rank: it is added to the port
    (0 stays any), and beyond DP rank 0 to the name of the endpoint file.
    """

    def __init__(self, api: Api, dp_rank: int = 0) -> None:
        self._api = api
        self.port = api.config.port + dp_rank if api.config.port else 0
        suffix = f".dp{dp_rank}" if dp_rank else ""
        path = api.config.endpoint_file
        self._endpoint_file = None if path is None else Path(path + suffix)
        self._has_endpoint_file = False
        self._runner = web.AppRunner(
            build_app(api),
            handler_cancellation=True,  # a client that leaves ends its handler, streaming or not
            access_log=None,
            shutdown_timeout=CLOSE_GRACE_S,
            max_line_size=limits.MAX_HEADER_BYTES,
            max_field_size=limits.MAX_HEADER_BYTES,
        )

    async def open(self) -> str:
        """Listen and return the URL, with this host's name if every interface serves. Raises
        StartupError that names the flag."""
        config = self._api.config
        await self._runner.setup()
        site = web.TCPSite(self._runner, config.host, self.port, backlog=1024)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            raise StartupError(
                f"cannot serve HTTP on --host {config.host} --port {self.port}: {error}"
            ) from None
        port = self._runner.addresses[0][1]
        host = socket.gethostname() if config.host in ANY_ADDRESS else config.host
        host = f"[{host}]" if ":" in host else host
        url = f"http://{host}:{port}{config.root_path}"
        if self._endpoint_file is not None:
            try:
                await asyncio.get_running_loop().run_in_executor(
                    None, _write_atomically, self._endpoint_file, url + "\n"
                )
            except OSError as error:
                raise StartupError(
                    f"--endpoint-file {config.endpoint_file}: {error.strerror}"
                ) from None
            self._has_endpoint_file = True
        return url

    async def close(self) -> None:
        """Stop listening, let handlers write their last bytes, remove the endpoint file."""
        await self._runner.cleanup()
        if self._has_endpoint_file:
            assert self._endpoint_file is not None
            self._endpoint_file.unlink(missing_ok=True)


def _write_atomically(path: Path, text: str) -> None:
    """A reader sees the whole text or no file."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
