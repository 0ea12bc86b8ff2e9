"""GET /openapi.json: what this server takes and answers.

Made from the types that decode bodies and encode answers, from the routes of the application, and
from `OPERATIONS`, which says what neither knows. So it cannot promise what is not checked. What a
schema cannot say is a 400 all the same: lengths in tokens, and rules between fields.
"""

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from aiohttp import web

from aioengine import limits
from aioengine.api import admin, answers, schema, status, tokens, trace
from aioengine.api.access import ADMIN, ALWAYS_OPEN
from aioengine.api.chat import chat_completions
from aioengine.api.completions import completions
from aioengine.api.context import API, Api
from aioengine.api.handlers import Handler
from aioengine.api.metrics import metrics
from aioengine.api.outputs import json_response
from aioengine.frontend.sampling import TokenId
from aioengine.frontend.text import ServedModel
from aioengine.limits import MAX_RECORDED_SECONDS, MAX_RECORDED_STEPS

JSON: Final = "application/json"
METHODS: Final = ("GET", "POST")
TOKEN_ID: Final = msgspec.json.schema(TokenId)
MODEL: Final = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}
"""The schema of `model` in bodies; another name than the one that is served is a 404."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """What a route does beyond its path and method."""

    answer: Any
    """Type of the JSON with status 200; str: plain text."""
    body: type[msgspec.Struct] | None = None
    events: type[msgspec.Struct] | None = None
    """Of the stream that it answers with instead, where a body asks for one."""
    unready: type[msgspec.Struct] = answers.ErrorAnswer
    """With status 503."""
    query: tuple[tuple[str, dict[str, Any]], ...] = ()
    """Parameters and their schemas."""


def _whole_number(most: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": 1, "maximum": most}


OPERATIONS: Final[dict[Handler, Operation]] = {
    status.livez: Operation(answer=answers.Status),
    status.readyz: Operation(answer=answers.Status, unready=answers.Status),
    status.health: Operation(answer=answers.Status, unready=answers.Status),
    status.server_version: Operation(answer=answers.Version),
    status.server_info: Operation(answer=dict[str, Any]),
    metrics: Operation(answer=str),
    status.models: Operation(answer=answers.ModelList),
    status.one_model: Operation(answer=answers.ModelCard),
    status.tokenizer_info: Operation(answer=answers.TokenizerInfo),
    completions: Operation(
        body=schema.CompletionBody, answer=answers.Completion, events=answers.CompletionPart
    ),
    chat_completions: Operation(
        body=schema.ChatBody, answer=answers.ChatCompletion, events=answers.ChatChunk
    ),
    tokens.tokenize: Operation(body=schema.TokenizeBody, answer=answers.Tokens),
    tokens.detokenize: Operation(body=schema.DetokenizeBody, answer=answers.Text),
    admin.collective_rpc: Operation(body=schema.RpcBody, answer=answers.RpcResults),
    admin.reset_prefix_cache: Operation(answer=answers.Status),
    trace.state: Operation(answer=dict[str, Any]),
    trace.stacks: Operation(answer=dict[str, Any]),
    trace.steps: Operation(
        answer=dict[str, Any],
        query=(
            ("steps", _whole_number(MAX_RECORDED_STEPS)),
            ("seconds", _whole_number(MAX_RECORDED_SECONDS)),
            ("replica", {"type": "integer", "minimum": 0}),
        ),
    ),
}


async def openapi(request: web.Request) -> web.Response:
    return json_response(await request.app[API].text.run(describe, request.app))


OPERATIONS[openapi] = Operation(answer=dict[str, Any])


def describe(app: web.Application) -> dict[str, Any]:
    """The document, an OpenAPI 3.1 object."""
    api = app[API]
    types = _Types()
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        if route.method in METHODS and route.resource is not None:
            path = route.resource.canonical.removeprefix(api.config.root_path)
            described = _operation(api, path, route.handler, types)
            paths.setdefault(path, {})[route.method.lower()] = described
    for kind in (schema.CompletionBody, schema.ChatBody):
        _add_unsupported(types.schemas[kind.__name__], kind)
    schemas = types.schemas if api.model is None else _narrowed(types.schemas, api.model)
    return {
        "openapi": "3.1.0",
        "info": {"title": "aioengine", "version": status.VERSION},
        "servers": [{"url": api.config.root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                name: {"type": "http", "scheme": "bearer"} for name in ("apiKey", "adminKey")
            },
        },
    }


class _Types:
    """JSON schemas by reference."""

    def __init__(self) -> None:
        self.schemas: dict[str, Any] = {}

    def content(self, kind: Any) -> dict[str, Any]:
        """The value of `content` for JSON of this type, or for text."""
        if kind is str:
            return {"text/plain": {"schema": {"type": "string"}}}
        (found,), schemas = msgspec.json.schema_components(
            [kind], ref_template="#/components/schemas/{name}"
        )
        self.schemas |= schemas
        return {JSON: {"schema": found}}


def _operation(api: Api, path: str, handler: Any, types: _Types) -> dict[str, Any]:
    operation = OPERATIONS[handler]
    error = types.content(answers.ErrorAnswer)
    content = types.content(operation.answer)
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "query", "schema": value} for name, value in operation.query
    ]
    if "{name}" in path:
        name = {"type": "string"} if api.model is None else {"enum": [api.model.name]}
        parameters.append({"name": "name", "in": "path", "required": True, "schema": name})
    if operation.events is not None:
        types.content(operation.events)
        content["text/event-stream"] = {"schema": _event(operation.events)}
        pin = {"type": "integer", "minimum": 0, "exclusiveMaximum": len(api.front_end.replicas)}
        parameters.append({"name": "X-data-parallel-rank", "in": "header", "schema": pin})
    described: dict[str, Any] = {
        "operationId": handler.__name__,
        "parameters": parameters,
        "security": _security(api, path),
        "responses": {
            "200": {"description": "It is done.", "content": content},
            "4XX": {"description": "What is wrong with the request.", "content": error},
            "503": {
                "description": "Not at present; Retry-After says when, if it is known.",
                "content": types.content(operation.unready),
            },
            "5XX": {"description": "What went wrong here.", "content": error},
        },
    }
    if operation.body is not None:
        content = types.content(operation.body)
        described["requestBody"] = {"required": True, "content": content}
    if handler.__doc__:
        described["description"] = handler.__doc__
    return described


def _event(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The schema of one event of a stream."""
    text = f"A {kind.__name__} as JSON; after a failure an ErrorAnswer; at the end [DONE]."
    data = {"type": "string", "description": text}
    return {"type": "object", "required": ["data"], "properties": {"data": data}}


def _security(api: Api, path: str) -> list[dict[str, list[str]]]:
    if path in ADMIN:
        return [{"adminKey": []}]
    is_open = path in ALWAYS_OPEN or (path == "/metrics" and not api.config.metrics_require_key)
    return [{"apiKey": []}] if api.config.api_key and not is_open else []


def _add_unsupported(found: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """What a body may hold beyond the fields of its type."""
    found["maxProperties"] = limits.MAX_BODY_FIELDS
    for name in schema.UNSUPPORTED.keys() - set(kind.__struct_fields__):
        neutral = {"enum": list(schema.UNSUPPORTED[name]), "description": "Not supported yet."}
        found["properties"][name] = neutral


def _narrowed(found: Any, model: ServedModel) -> Any:
    """A schema with what follows from the model that is served: its name, its vocabulary."""
    if isinstance(found, list):
        return [_narrowed(part, model) for part in found]
    if not isinstance(found, dict):
        return found
    if found == TOKEN_ID:
        return {**TOKEN_ID, "exclusiveMaximum": model.config.vocab_size}
    narrowed = {name: _narrowed(part, model) for name, part in found.items()}
    if narrowed.get("properties", {}).get("model") == MODEL:
        narrowed["properties"]["model"] = {"enum": [None, model.name], "default": None}
    return narrowed
