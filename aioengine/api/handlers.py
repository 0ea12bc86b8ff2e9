"""What a handler is, and which route it serves."""

from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import web

from aioengine.api.context import API

PROBES: Final = frozenset({"/livez", "/readyz", "/health", "/metrics"})
"""Asked every few seconds by machines."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def route_of(request: web.Request) -> str | None:
    """The route as it was declared, without --root-path; None where there is none."""
    resource = request.match_info.route.resource
    if resource is None:
        return None
    return resource.canonical.removeprefix(request.app[API].config.root_path)
