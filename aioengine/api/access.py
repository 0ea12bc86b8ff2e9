"""Who may call what: API keys, the admin key, and web pages of other origins."""

import hashlib
import hmac
from collections.abc import Collection, Iterable
from typing import Final

from aiohttp import hdrs, web

from aioengine.api.context import API
from aioengine.api.errors import ApiError
from aioengine.api.handlers import Handler, route_of

ALWAYS_OPEN: Final = frozenset({"/livez", "/readyz", "/health"})
ADMIN: Final = frozenset(
    {"/collective_rpc", "/reset_prefix_cache", "/trace/state", "/trace/stacks", "/trace/steps"}
)
METHODS: Final = "GET, HEAD, POST"
"""Of all routes."""
PREFLIGHT_LASTS_S: Final = 600


class Keys:
    """Keys that open the same routes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, request: web.Request, complaint: str) -> None:
        """Raises ApiError 401, in a time that tells neither how much of a key was right, nor how
        long one is, nor which of them it was."""
        scheme, _, key = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
        digest = _digest(key)
        is_right = False
        for known in self._digests:
            is_right |= hmac.compare_digest(digest, known)
        if not is_right or scheme.lower() != "bearer":
            raise ApiError(401, complaint, code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


KEYS: Final = web.AppKey("keys", Keys)
ADMIN_KEYS: Final = web.AppKey("admin_keys", Keys)


@web.middleware
async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The API key, where one is set; the admin key for what changes the engine.

    Routes are closed unless they are listed as open; so is what is no route. The route itself
    decides, not the path, the host or another text of the client's: they can be written in more
    ways than one.
    """
    app, route = request.app, route_of(request)
    if route in ADMIN:
        if not app[ADMIN_KEYS]:
            raise ApiError(403, f"{route} needs a server started with --admin-api-key")
        app[ADMIN_KEYS].check(request, "the admin key is missing or wrong")
    elif app[KEYS]:
        is_open_metrics = route == "/metrics" and not app[API].config.metrics_require_key
        if route not in ALWAYS_OPEN and not is_open_metrics:
            app[KEYS].check(request, "the API key is missing or wrong")
    return await handler(request)


@web.middleware
async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """What browsers ask before a page of an allowed origin may send a request; they send no key."""
    asks = (
        request.method == hdrs.METH_OPTIONS
        and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    )
    if not asks or not origin_headers(request, request.app[API].config.allowed_origins):
        return await handler(request)
    wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
    headers = {
        hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS,
        hdrs.ACCESS_CONTROL_MAX_AGE: str(PREFLIGHT_LASTS_S),
    }
    if wanted is not None:
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = wanted
    return web.Response(status=204, headers=headers)


def origin_headers(request: web.BaseRequest, allowed: Collection[str]) -> dict[str, str]:
    """What lets a page read the answer; nothing for pages that may not, and other clients."""
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None or not ("*" in allowed or origin in allowed):
        return {}
    headers: dict[str, str] = {
        hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: "*" if "*" in allowed else origin,
        hdrs.ACCESS_CONTROL_EXPOSE_HEADERS: "X-Request-Id, Retry-After",
    }
    if "*" not in allowed:
        headers[hdrs.VARY] = hdrs.ORIGIN
    return headers
