"""Ways in which other servers of models were broken: one test for each class of published advisory
that can apply to keys, paths, ids, templates and what errors say. Bodies: test_advisories_bodies.py
and test_api_bodies.py; headers: test_api_connections.py; template bombs by themselves:
unit/frontend/test_template.py; what a real engine shows: e2e/test_advisories_*.py."""

import asyncio
import dataclasses
import hmac
import re
import threading
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, serving
from support.mailbox import settle
from support.raw_http import ask, connected, head, read_answer
from support.tiny_model import ids, served_model

from aioengine.api.schema import UNSUPPORTED_PARTS
from aioengine.frontend import template_sandbox
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.template import ChatTemplate
from aioengine.frontend.tokenizer import Tokenizer
from aioengine.messages import AddRequest

ENDLESS = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
    "{% endfor %}{% endfor %}{% endfor %}"
)

GENERATING = ((COMPLETIONS, PROMPT), (CHAT, MESSAGES))
INSIDE = re.compile(r"0x[0-9a-f]{6,}|Traceback|\.py\b|/home/| object at |aioengine\.")
"""Addresses, stacks, files, objects, modules."""

# --- keys ----------------------------------------------------------------------------------------


async def test_the_time_of_a_refusal_tells_nothing_of_a_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CVE-2025-59425: keys were compared character by character.

    Whatever is sent, digests of one length are compared, with every key.
    """
    compared: list[tuple[int, int]] = []
    compare = hmac.compare_digest

    def recorded(a: bytes, b: bytes) -> bool:
        compared.append((len(a), len(b)))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", recorded)
    async with serving(api_key=("short", "one that is longer", "third")) as server:
        for key in ("", "s", "short", "third", "one that is longe", "x" * 5000):
            compared.clear()
            await server.get("/version", headers={"Authorization": f"Bearer {key}"})
            assert compared == [(32, 32)] * 3


TARGETS = [
    "//v1/models",
    "///v1/models",
    "/v1//models",
    "/./v1/models",
    "/v1/../v1/models",
    "/health/../v1/models",
    "/health/%2e%2e/v1/models",
    "/health/..%2fv1/models",
    "/health%2f..%2fv1/models",
    "/%76%31/models",
    "/v1%2fmodels",
    "/v1/models/",
    "/V1/MODELS",
    "/v1/models;/health",
    "/v1/models?/health",
    "/v1/models?x=/../health",
    "/v1/models%3f/health",
    "/v1/models%23/health",
    "/v1/models#/health",
    "/v1/models%00/health",
    "/v1/models%0a/health",
    "/v1\\models",
    "http://x/v1/models",
    "http://x/health/../v1/models",
    "http://health/v1/models",
    "http://x/health@y/v1/models",
    "http://x:8000//v1/models",
    "https://x/v1/models",
    "/llm/v1/models",
    "/llm//health/../v1/models",
]
HOSTS = ["x", "/health", "x/health?", "x/health#", "x/livez/..;", "[::1]/health", "a@b/health"]
ELSEWHERE = {
    "X_Original_URL": "/health",
    "X_Rewrite_URL": "/health",
    "X_Forwarded_Prefix": "/health",
    "X_Forwarded_Path": "/health",
    "X_Forwarded_For": "127.0.0.1",
    "X_HTTP_Method_Override": "OPTIONS",
    "Forwarded": "for=127.0.0.1;host=health",
}


@pytest.mark.parametrize("root_path", ["", "/llm"])
@pytest.mark.parametrize("host", HOSTS)
async def test_no_spelling_of_a_request_gets_round_the_key(root_path: str, host: str) -> None:
    """CVE-2026-48746 (GHSA-94f4-hr76-p5j6): the key was asked for by a path that Host could change.

    Here the route that was found decides, and what is no route is closed.
    """
    async with serving(api_key=("key",), root_path=root_path) as server:
        base = server.url.removesuffix(root_path)
        for target in [root_path + "/v1/models", *TARGETS]:
            for headers in ({}, ELSEWHERE):
                request = head("GET", target, host=host, **headers)
                status, _, body = await ask(base, request)
                assert status in (400, 401), (target, status)
                assert b'"error"' in body
        body = b'{"prompt": "a"}'
        request = head("POST", root_path + COMPLETIONS, host=host, Content_Length=len(body)) + body
        assert (await ask(base, request))[0] in (400, 401)
        assert not server.leader.of(AddRequest)
        request = head("GET", root_path + "/v1/models", Authorization="Bearer key")
        assert (await ask(base, request))[0] == 200


async def test_a_request_hidden_in_another_ones_body_needs_a_key_too() -> None:
    """Requests on one connection: a body that nobody reads is not a request, nor is its key."""
    hidden = head("GET", "/v1/models", Authorization="Bearer key")
    async with serving(api_key=("key",)) as server, connected(server.url) as (reader, writer):
        writer.write(head("POST", COMPLETIONS, Content_Length=len(hidden)) + hidden)
        writer.write(head("GET", "/v1/models"))
        assert [(await read_answer(reader))[0] for _ in range(2)] == [401, 401]


# --- ids -----------------------------------------------------------------------------------------


async def test_two_requests_with_one_id_do_not_meet() -> None:
    """vLLM issues 10583 and 15041: ids that clients chose were keys in the engine."""
    async with serving() as server, asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(
                server.post(
                    COMPLETIONS,
                    {"prompt": text, "request_id": "same"},
                    headers={"X-Request-Id": "same"},
                )
            )
            for text in ("a", "b")
        ]
        added = await server.leader.added(2)
        assert len({request.request_id for request in added}) == 2
        for request in added:
            server.leader.answer(request, request.token_ids, "length")
        answers = [await task for task in asked]
        assert {answer.json["choices"][0]["text"] for answer in answers} == {"a", "b"}
        assert len({answer.json["id"] for answer in answers}) == 2
        assert {answer.headers["X-Request-Id"] for answer in answers} == {"same"}


@pytest.mark.parametrize(
    "forged",
    ["", " ", "a b", 'a"b', "<script>", "a,b", "é", "x" * 129, "a;b", "%0d%0aSet-Cookie:x", "{}"],
)
async def test_ids_that_are_none_do_not_come_back(forged: str) -> None:
    """They would end up in logs, headers and whoever reads them."""
    async with serving() as server:
        request = head("GET", "/version", X_Request_Id=forged)
        status, headers, _ = await ask(server.url, request)
        assert status == 200
        assert headers["x-request-id"].startswith("req-")


# --- templates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["chat_template", "chat_template_kwargs"])
async def test_templates_of_clients_are_not_run(field: str) -> None:
    """PYSEC-2026-2013, CVE-2026-115918 (GHSA-x567-49g5-p4cf): a template came with the request, or
    in its chat_template_kwargs; CVE-2025-62426 (GHSA-69j4-grxj-j64p): an argument of what renders
    it did."""
    template = "{{ raise_exception('it ran') }}"
    async with serving() as server, asyncio.TaskGroup() as tasks:
        if field == "chat_template":
            answer = await server.post(CHAT, {**MESSAGES, "chat_template": template})
            assert (answer.status, answer.error["code"]) == (400, "unsupported")
            return
        names = {"chat_template": template, "tokenize": True, "return_dict": True, "padding": True}
        asked = tasks.create_task(server.post(CHAT, {**MESSAGES, "chat_template_kwargs": names}))
        (added,) = await server.play("hi")
        assert (await asked).status == 200
        assert added.token_ids == ids("<user>hello\n<assistant>")
        for name in ("messages", "add_generation_prompt", "bos_token", "eos_token"):
            answer = await server.post(CHAT, {**MESSAGES, "chat_template_kwargs": {name: "x"}})
            assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")


async def test_a_template_without_end_stops_neither_the_server_nor_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CVE-2026-115911 (GHSA-542m-9234-8gvf): the server's own template, from a model's files, say,
    occupied a thread for ever."""
    monkeypatch.setattr(template_sandbox, "MAX_TEMPLATE_CPU_S", 0.1)
    monkeypatch.setattr(template_sandbox, "MAX_TEMPLATE_STEPS", 10**12)
    async with serving() as server:
        template = ChatTemplate(ENDLESS)
        server.api.model = dataclasses.replace(served_model(), template=template)
        async with asyncio.TaskGroup() as tasks:
            chats = [tasks.create_task(server.post(CHAT, MESSAGES)) for _ in range(4)]
            while not all(chat.done() for chat in chats):
                assert (await server.get("/livez")).status == 200
        for chat in chats:
            answer = chat.result()
            assert (answer.status, answer.error["param"]) == (400, "messages")
            assert "takes more than 0.1 s" in answer.error["message"]
        async with asyncio.TaskGroup() as tasks:
            asked = tasks.create_task(server.post(COMPLETIONS, PROMPT))
            await server.play("hi")
        assert asked.result().status == 200
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("text")]


# --- what errors say -----------------------------------------------------------------------------


async def test_errors_tell_nothing_of_the_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2026-22778 (GHSA-4r2x-xpjr-7cvv) and CVE-2026-54236 (GHSA-hgg8-fqqc-vfmw): an exception's
    text, with an address of the heap, was sent to the client."""

    def fail(*_: object) -> None:
        raise RuntimeError(f"{object()} at /home/somebody/secret.py")

    async with serving() as server:
        monkeypatch.setattr(FrontEnd, "generate", fail)
        answers = [await server.post(path, body) for path, body in GENERATING]
        monkeypatch.setattr(Tokenizer, "encode", fail)
        answers += [await server.post("/tokenize", body) for body in (PROMPT, MESSAGES)]
        source = "{{ raise_exception(cycler) }}{{ messages.x.y }}"
        server.api.model = dataclasses.replace(served_model(), template=ChatTemplate(source))
        refusals = [await server.post(CHAT, MESSAGES)]
        for body in (b"\xff", b"{", b'{"prompt": {"a": NaN}}', b'{"prompt": [[[]]], "n": "x"}'):
            refusals += [await server.post(path, body) for path, _ in GENERATING]
    assert [answer.status for answer in answers] == [500] * 4
    assert [answer.status for answer in refusals] == [400] * 9
    for answer in [*answers, *refusals]:
        assert not INSIDE.search(answer.text), answer.text


async def test_addresses_in_a_body_are_not_followed() -> None:
    """CVE-2026-24779, CVE-2026-25960: what a content part pointed to was fetched by the server."""
    visits: list[object] = []
    listener = await asyncio.start_server(lambda *streams: visits.append(streams), "127.0.0.1", 0)
    async with serving() as server, listener:
        host, port = listener.sockets[0].getsockname()
        url = f"http://{host}:{port}/x.png"
        for kind in sorted(UNSUPPORTED_PARTS):
            part = {"type": kind, kind: {"url": url}, "url": url}
            message = {"role": "user", "content": [part]}
            for path in (CHAT, "/tokenize"):
                answer = await server.post(path, {"messages": [message]})
                assert (answer.status, answer.error["code"]) == (400, "unsupported")
        body = {**MESSAGES, "chat_template": url}
        assert (await server.post(CHAT, body)).status == 400
        await settle()
        assert not visits


async def test_what_a_template_says_is_bounded() -> None:
    """Also what it says of a client's text."""
    source = "{{ raise_exception(messages[0].content) }}"
    async with serving() as server:
        server.api.model = dataclasses.replace(served_model(), template=ChatTemplate(source))
        message: dict[str, Any] = {"role": "user", "content": "no, " * 100_000}
        answer = await server.post(CHAT, {"messages": [message]})
        assert answer.status == 400
        assert "no, no, " in answer.error["message"]
        assert len(answer.text) < 1000
