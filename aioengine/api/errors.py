"""What went wrong, in the form that OpenAI's clients expect."""

import math
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web

RETRY_AFTER_S: Final = 5
MAX_MESSAGE_CHARS: Final = 400
"""Of a refusal, which may quote what the client sent."""


class ApiError(Exception):
    """Becomes a response with an OpenAI-shaped body; `param` is the field of the body that
    is at fault, None where none is. `retry_after_s` counts with status 503."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = RETRY_AFTER_S if retry_after_s is None else retry_after_s

    def body(self) -> dict[str, Any]:
        return error_body(self.status, str(self), self.param, self.code)

    def response(self) -> web.Response:
        headers = {}
        if self.status == 503:
            headers[hdrs.RETRY_AFTER] = str(math.ceil(self.retry_after_s))
        elif self.status == 401:
            headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
        return web.Response(
            status=self.status,
            body=msgspec.json.encode(self.body()),
            content_type="application/json",
            headers=headers,
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message[:MAX_MESSAGE_CHARS], param=param, code=code)


def unsupported(path: str) -> ApiError:
    """`path` is a field, or a part of one behind a dot."""
    field = path.partition(".")[0]
    return invalid(f"{path} is not supported by this server yet", field, "unsupported")


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
    if status >= 500:
        kind = "server_error" if status == 500 else "service_unavailable_error"
    else:
        kind = kinds.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
