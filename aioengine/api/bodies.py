"""Bodies of requests: read before their handlers run, within limits of size and time."""

import asyncio
from typing import Final

from aiohttp import hdrs, web

from aioengine.api.errors import ApiError
from aioengine.api.handlers import Handler
from aioengine.limits import MAX_BODIES_BYTES, MAX_BODY_BYTES, MAX_BODY_SECONDS


class BodyBudget:
    """Bytes that the bodies of all requests in hand may take together."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises ApiError 503 when there is no room."""
        if self._num_bytes + num_bytes > MAX_BODIES_BYTES:
            raise ApiError(503, "too many large requests at a time", code="overloaded")
        self._num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._num_bytes -= num_bytes


BODIES: Final = web.AppKey("bodies", BodyBudget)


@web.middleware
async def read_body(request: web.Request, handler: Handler) -> web.StreamResponse:
    """A handler's own `request.read()` then finds the body there."""
    if not request.body_exists or request.match_info.http_exception is not None:
        return await handler(request)
    is_plain = hdrs.CONTENT_ENCODING not in request.headers
    length = request.content_length if is_plain else None
    if length is not None and length > MAX_BODY_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY_BYTES, length)
    budget = request.app[BODIES]
    held = MAX_BODY_BYTES if length is None else length
    budget.take(held)
    try:
        size = len(await _read(request))
        budget.give_back(held - size)
        held = size
        return await handler(request)
    finally:
        budget.give_back(held)


async def _read(request: web.Request) -> bytes:
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            return await request.read()
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {MAX_BODY_SECONDS:g} s") from None
