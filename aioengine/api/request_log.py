"""Ids of requests, and a line in the log for each (--enable-log-requests).

An id is for people who look for a request in several logs. Nothing here is found by it: the engine
numbers its requests itself, so a forged or repeated one is only confusing.
"""

import logging
import re
import secrets
import time
from typing import Final

from aiohttp import web

from aioengine.api.access import origin_headers
from aioengine.api.context import API, GENERATION, Api
from aioengine.api.handlers import PROBES, Handler, route_of
from aioengine.frontend.records import Generation

log = logging.getLogger(__name__)

HEADER: Final = "X-Request-Id"
WELL_FORMED: Final = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
REQUEST_ID: Final = web.RequestKey("request_id", str)
MAX_PATH_CHARS: Final = 200
MAX_ERROR_CHARS: Final = 200
CLIENT_LEFT: Final = 499
"""In the log, in place of a status: nobody was there to be answered."""


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """To every response, streams and errors included."""
    if REQUEST_ID in request:  # else a header was refused before any middleware ran
        response.headers[HEADER] = request[REQUEST_ID]
    response.headers.update(origin_headers(request, request.app[API].config.allowed_origins))


@web.middleware
async def name_and_log(request: web.Request, handler: Handler) -> web.StreamResponse:
    given = request.headers.get(HEADER, "")
    is_usable = WELL_FORMED.fullmatch(given)
    request[REQUEST_ID] = given if is_usable else f"req-{secrets.token_hex(12)}"
    api = request.app[API]
    if not api.config.enable_log_requests:
        return await handler(request)
    began_s = time.monotonic()
    status = CLIENT_LEFT
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        route = route_of(request)
        if route not in PROBES or status >= 400:
            _write(api, request, route, status, time.monotonic() - began_s)


def _write(api: Api, request: web.Request, route: str | None, status: int, total_s: float) -> None:
    path = route or repr(request.path[:MAX_PATH_CHARS])
    words = [f"{request[REQUEST_ID]}: {request.method} {path} {status}"]
    generation = request.get(GENERATION)
    if generation is not None:
        words += _about(api, generation)
    log.info("%s, %.3f s", ", ".join(words), total_s)


def _about(api: Api, generation: Generation) -> list[str]:
    choices = generation.choices
    prompts = list(dict.fromkeys(choice.spec.prompt_ids for choice in choices))
    num_output = sum(choice.num_output_tokens for choice in choices)
    words = [f"{sum(map(len, prompts))} + {num_output} tokens"]
    firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
    if firsts:
        words.append(f"first after {min(firsts):.3f} s")
    if errors := [choice.error for choice in choices if choice.error]:
        words.append(f"failed: {errors[0][:MAX_ERROR_CHARS]!r}")
    max_chars = api.config.max_log_len
    if max_chars and api.model is not None:
        for prompt_ids in prompts:
            text = api.model.tokenizer.decode(prompt_ids[:max_chars], skip_special_tokens=False)
            words.append(f"prompt {text[:max_chars]!r}")
    return words
