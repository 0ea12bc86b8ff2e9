"""One client's connection: what it may cost before it is a request, and what is no HTTP at all."""

import asyncio
import logging
import math
import socket
from typing import Any, ClassVar, Final

import msgspec
from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import LineTooLong

from aioengine.api.errors import ApiError
from aioengine.limits import (
    MAX_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
    MAX_STALL_SECONDS,
    MAX_TARGET_BYTES,
    MAX_UNSENT_BYTES,
)

log = logging.getLogger(__name__)

IDLE_S: Final = 620.0
"""Longer than proxies keep their connections, so that it is they who close."""
WARNING_PAUSE_S: Final = 60.0
MAX_REASON_CHARS: Final = 200
REFUSED_HEAD: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b"
)
CLIENTS_FAULTS: Final = (HttpProcessingError, web.RequestPayloadError, ConnectionError)


class Connection(web.RequestHandler):
    """aiohttp's, but faults of clients get an answer in OpenAI's form and at most a line in the
    log, and what a client may hold without asking for anything is bounded."""

    _warned_at_s: ClassVar[float] = -math.inf

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=IDLE_S,
            max_line_size=MAX_TARGET_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own way to have none
        )
        self._server = server
        self._num_head_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self._server.connections) >= MAX_CONNECTIONS:
            self._warn_of_refusals()
            transport.close()
            return
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            tcp = socket.IPPROTO_TCP
            sock.setsockopt(tcp, socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES)
            sock.setsockopt(tcp, socket.TCP_USER_TIMEOUT, MAX_STALL_SECONDS * 1000)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._current_request is not None and self._is_broken():
            # aiohttp answers it afterwards; until then nobody would tell who waits for the body
            self._current_request.content.set_exception(web.RequestPayloadError("broken framing"))
        if self._waiter is None or self._waiter.done():  # a request is there, and being handled
            self._num_head_bytes = 0
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES and self.transport is not None:
            refusal = ApiError(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes")
            body = msgspec.json.encode(refusal.body())
            self.transport.write(REFUSED_HEAD % (len(body), body))
            self.force_close()

    def _warn_of_refusals(self) -> None:
        now_s = self._loop.time()
        if now_s - Connection._warned_at_s > WARNING_PAUSE_S:
            Connection._warned_at_s = now_s
            log.warning("connections are refused: %d are open", MAX_CONNECTIONS)

    def _is_broken(self) -> bool:
        """What came last was no HTTP."""
        return bool(self._messages) and hasattr(self._messages[-1][0], "exc")

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if not isinstance(exc, CLIENTS_FAULTS):
            return super().handle_error(request, status, exc, message)
        log.debug("no HTTP from %s: %s", request.remote, _reason(exc))
        response = _refusal(exc).response()
        response.force_close()
        return response

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Of what is not handled elsewhere, such as a body that breaks off after its answer."""
        error = options.get("exc_info")
        if isinstance(error, CLIENTS_FAULTS):
            log.debug("broken request: %s", _reason(error))
        else:
            super().log_exception(*args, **options)


def _refusal(error: BaseException) -> ApiError:
    if isinstance(error, LineTooLong):
        if error.args[1] == MAX_TARGET_BYTES:
            return ApiError(414, f"the request line is longer than {MAX_TARGET_BYTES} bytes")
        return ApiError(431, f"a header is larger than {MAX_HEADER_BYTES} bytes")
    if "Too many headers" in str(error):
        return ApiError(431, f"more than {MAX_HEADERS} headers")
    return ApiError(400, f"this is no valid HTTP: {_reason(error)}")


def _reason(error: BaseException) -> str:
    """Without what aiohttp quotes of the request."""
    text = error.message if isinstance(error, HttpProcessingError) else str(error)
    return text.partition("\n")[0].rstrip(": ")[:MAX_REASON_CHARS]
