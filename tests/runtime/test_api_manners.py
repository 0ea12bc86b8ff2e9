"""What every route has in common: who may call it, its methods, ids, the log, and other origins."""

import asyncio
import logging
import os
import re
import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, Served, serving
from support.tiny_model import MODEL_NAME

from aioengine.api.app import build_app
from aioengine.api.context import Api
from aioengine.api.server import HttpServer
from aioengine.config import EngineConfig
from aioengine.errors import StartupError

OPEN = {"/livez", "/readyz", "/health", "/metrics"}
ADMIN = {"/collective_rpc", "/reset_prefix_cache", "/trace/state", "/trace/stacks", "/trace/steps"}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
NO_STEPS = "?steps=0"
"""So that /trace/steps does not wait for any."""
KEYS = ("first", "sécond")
MAKE_CERTIFICATE = (
    "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
    "-addext subjectAltName=IP:127.0.0.1"
)


def routes(api: Api) -> dict[str, set[str]]:
    """The methods of every route there is."""
    found: dict[str, set[str]] = {}
    for route in build_app(api).router.routes():
        assert route.resource is not None
        path = re.sub(r"\{.*?\}", MODEL_NAME, route.resource.canonical)
        found.setdefault(path, set()).add(route.method)
    assert {COMPLETIONS, CHAT, *OPEN, *ADMIN} <= found.keys()
    return found


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- keys ----------------------------------------------------------------------------------------


async def test_what_is_not_listed_as_open_is_closed() -> None:
    async with serving(api_key=KEYS, admin_api_key="admin") as server:
        for path, methods in routes(server.api).items():
            for method in methods:
                for headers in ({}, bearer("firs"), bearer("firstt"), bearer("admin")):
                    if path in ADMIN and headers == bearer("admin"):
                        continue
                    answer = await server.ask(method, path, headers=headers)
                    is_open = path in OPEN
                    assert (answer.status == 200) == is_open, (method, path)
                    assert is_open or answer.status == 401
                    if not is_open:
                        assert answer.headers["WWW-Authenticate"] == "Bearer"


async def test_each_key_opens_and_none_of_them_what_is_the_admins() -> None:
    async with serving(api_key=KEYS, admin_api_key="admin", metrics_require_key=True) as server:
        for path, methods in routes(server.api).items():
            for key in KEYS:
                statuses = {
                    (await server.ask(method, path, headers=bearer(key), json={})).status
                    for method in methods
                }
                assert (401 in statuses) == (path in ADMIN), path
        assert (await server.get("/metrics")).status == 401
        assert (
            await server.get("/version", headers={"Authorization": "bearer first"})
        ).status == 200


# --- methods -------------------------------------------------------------------------------------


async def test_every_method_of_every_route() -> None:
    """405 names those that there are; HEAD is GET without its body; OPTIONS is none of ours. (With
    a failed replica every route answers at once.)"""
    async with serving(states=["failed"], admin_api_key="admin") as server:
        for path, methods in routes(server.api).items():
            for method in METHODS:
                answer = await server.ask(method, path + NO_STEPS, headers=bearer("admin"))
                if method not in methods:
                    assert answer.status == 405, (method, path)
                    assert answer.headers["Allow"] == ", ".join(sorted(methods))
                else:
                    assert answer.status not in (404, 405), (method, path)
                if method == "HEAD":
                    assert answer.text == ""
                elif answer.status >= 400 and (method not in methods or path not in OPEN):
                    assert answer.error


@pytest.mark.parametrize("path", ["/livez", "/health", "/v1/models", "/version"])
async def test_head_says_what_get_would(path: str) -> None:
    async with serving() as server:
        whole, head = await server.get(path), await server.ask("HEAD", path)
        assert (head.status, head.text) == (whole.status, "")
        for name in ("Content-Length", "Content-Type"):
            assert head.headers[name] == whole.headers[name]


# --- ids -----------------------------------------------------------------------------------------


async def test_ids_come_back_with_every_kind_of_answer() -> None:
    async with serving() as server, asyncio.TaskGroup() as tasks:
        for path, body, status in (
            ("/version", None, 200),
            ("/nowhere", None, 404),
            (CHAT, {}, 400),
            (COMPLETIONS, b"x" * (8 * 2**20 + 1), 413),
        ):
            ask = server.get if body is None else server.post
            answer = await ask(
                path, *([] if body is None else [body]), headers={"X-Request-Id": "me/1"}
            )
            assert (answer.status, answer.headers["X-Request-Id"]) == (status, "me/1")
        headers = {"X-Request-Id": "stream-1"}
        asked = tasks.create_task(
            server.post(COMPLETIONS, {**PROMPT, "stream": True}, headers=headers)
        )
        await server.play("hi")
        assert (await asked).headers["X-Request-Id"] == "stream-1"


async def test_without_an_id_there_is_a_new_one() -> None:
    async with serving() as server:
        found = {(await server.get("/version")).headers["X-Request-Id"] for _ in range(3)}
        assert len(found) == 3


# --- the log -------------------------------------------------------------------------------------


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "aioengine.api.request_log"]


async def ask_for_answers(server: Served) -> None:
    async with asyncio.TaskGroup() as tasks:
        headers = {"X-Request-Id": "one"}
        tasks.create_task(server.post(COMPLETIONS, {**PROMPT, "n": 2}, headers=headers))
        await server.play("ab", "c", count=2)
    async with asyncio.TaskGroup() as tasks:
        body = {"messages": [{"role": "user", "content": "sec\nret"}], "stream": True}
        tasks.create_task(server.post(CHAT, body, headers={"X-Request-Id": "two"}))
        (*_, added) = await server.leader.added(3)
        server.leader.answer(added, (100,), "length")


async def test_a_line_for_each_request_and_never_a_prompt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(enable_log_requests=True) as server:
        await ask_for_answers(server)
        await server.get("/nowhere%0A/here", headers={"X-Request-Id": "three"})
        await server.get("/livez")
    first, second, third = logged(caplog)
    assert re.fullmatch(
        r"one: POST /v1/completions 200, 5 \+ 6 tokens, first after \d\.\d{3} s, \d\.\d{3} s", first
    )
    assert second.startswith("two: POST /v1/chat/completions 200, ")
    assert third.startswith("three: GET '/nowhere\\n/here' 404, 0.")
    for word in ("hello", "sec", "ret'"):
        assert not any(word in record.getMessage() for record in caplog.records)


async def test_prompts_when_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(enable_log_requests=True, max_log_len=10) as server:
        await ask_for_answers(server)
    first, second = logged(caplog)
    assert "prompt 'hello', " in first
    assert "prompt '<user>sec\\n', " in second


async def test_a_client_that_leaves_has_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serving(enable_log_requests=True) as server:
        body = {**PROMPT, "stream": True}
        async with server.session.post(COMPLETIONS, json=body) as response:
            await server.leader.added()
            response.close()
        await server.leader.aborted()
    (line,) = logged(caplog)
    assert " POST /v1/completions 499, 5 + 0 tokens, " in line


async def test_a_stream_that_fails_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Its status was sent before."""
    caplog.set_level(logging.INFO)
    async with serving(enable_log_requests=True) as server, asyncio.TaskGroup() as tasks:
        tasks.create_task(server.post(COMPLETIONS, {**PROMPT, "stream": True}))
        (added,) = await server.leader.added()
        server.leader.answer(added, (), "error", error="the\ncause")
    (line,) = logged(caplog)
    assert " 200, 5 + 0 tokens, failed: 'the\\ncause', " in line


async def test_without_the_flag_there_are_no_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as server:
        await ask_for_answers(server)
    assert not logged(caplog)


# --- other origins -------------------------------------------------------------------------------

PAGE = {"Origin": "https://chat.example.org"}
PREFLIGHT = {
    **PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type",
}


def allowing(headers: Any) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.startswith("Access-Control-")}


@pytest.mark.parametrize("origins", [("*",), ("https://other.org", "https://chat.example.org")])
async def test_pages_of_an_allowed_origin(origins: tuple[str, ...]) -> None:
    """The preflight needs no key, what follows does."""
    async with serving(allowed_origins=origins, api_key=KEYS) as server:
        preflight = await server.ask("OPTIONS", CHAT, headers=PREFLIGHT)
        assert (preflight.status, preflight.text) == (204, "")
        wanted = PREFLIGHT["Access-Control-Request-Headers"]
        assert preflight.headers["Access-Control-Allow-Headers"] == wanted
        assert "POST" in preflight.headers["Access-Control-Allow-Methods"]
        refused = await server.get("/v1/models", headers=PAGE)
        served = await server.get("/v1/models", headers={**PAGE, **bearer("first")})
        assert (refused.status, served.status) == (401, 200)
        for answer in (preflight, refused, served):
            is_any = origins == ("*",)
            allowed = "*" if is_any else PAGE["Origin"]
            assert answer.headers["Access-Control-Allow-Origin"] == allowed
            assert answer.headers.get("Vary") == (None if is_any else "Origin")
        assert not allowing((await server.get("/livez")).headers)


@pytest.mark.parametrize(
    "origins", [(), ("https://other.org",), ("https://chat.example.org.evil",)]
)
async def test_pages_of_other_origins(origins: tuple[str, ...]) -> None:
    async with serving(allowed_origins=origins) as server:
        preflight = await server.ask("OPTIONS", CHAT, headers=PREFLIGHT)
        assert (preflight.status, allowing(preflight.headers)) == (405, {})
        assert not allowing((await server.get("/v1/models", headers=PAGE)).headers)


async def test_a_stream_can_be_read_by_a_page() -> None:
    async with serving(allowed_origins=("*",)) as server, asyncio.TaskGroup() as tasks:
        body = {**MESSAGES, "stream": True}
        asked = tasks.create_task(server.post(CHAT, body, headers=PAGE))
        await server.play("hi")
        assert (await asked).headers["Access-Control-Allow-Origin"] == "*"


# --- where it listens ----------------------------------------------------------------------------


async def get(url: str, connector: aiohttp.BaseConnector) -> int:
    async with aiohttp.ClientSession(connector=connector) as session, session.get(url) as response:
        return response.status


async def test_a_unix_socket(tmp_path: Path) -> None:
    path, endpoint = tmp_path / "api.sock", tmp_path / "endpoint"
    settings = {"uds": str(path), "endpoint_file": str(endpoint)}
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # left behind by a server that was killed
    async with serving(base="http://x", **settings) as server:
        assert server.url == f"unix:{path}"
        assert endpoint.read_text() == f"unix:{path}\n"
        assert await get("http://x/livez", aiohttp.UnixConnector(str(path))) == 200
        second = HttpServer(server.api)
        with pytest.raises(StartupError, match=rf"--uds {path}: somebody listens there"):
            await second.open()
        await second.close()
        assert await get("http://x/livez", aiohttp.UnixConnector(str(path))) == 200
    assert not os.listdir(tmp_path)


async def test_a_unix_socket_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for path in (tmp_path / "file", tmp_path / "no" / "socket", tmp_path / ("x" * 200)):
        with pytest.raises(StartupError, match="--uds"):
            async with serving(base="http://x", uds=str(path)):
                pass
    assert (tmp_path / "file").read_text() == "precious"


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    directory = tmp_path_factory.mktemp("tls")
    files = str(directory / "cert.pem"), str(directory / "key.pem")
    subprocess.run([*MAKE_CERTIFICATE.split(), "-out", files[0], "-keyout", files[1]], check=True)
    return files


async def test_https(certificate: tuple[str, str]) -> None:
    cert, key = certificate
    trust = ssl.create_default_context(cafile=cert)
    async with serving(ssl_certfile=cert, ssl_keyfile=key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert await get(server.url + "/livez", aiohttp.TCPConnector(ssl=trust)) == 200
        async with (
            asyncio.TaskGroup() as tasks,
            aiohttp.ClientSession(server.url, connector=aiohttp.TCPConnector(ssl=trust)) as session,
        ):
            tasks.create_task(server.play("hé", "llo"))
            async with session.post(COMPLETIONS, json={**PROMPT, "stream": True}) as response:
                assert (await response.text()).endswith("data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await get(server.url + "/livez", aiohttp.TCPConnector())


async def test_certificates_that_cannot_be_used(
    certificate: tuple[str, str], tmp_path: Path
) -> None:
    cert, key = certificate
    (tmp_path / "junk").write_text("junk")
    for files in ((cert, None), (str(tmp_path / "none"), key), (str(tmp_path / "junk"), key)):
        with pytest.raises(StartupError, match=rf"--ssl-certfile {files[0]}"):
            async with serving(ssl_certfile=files[0], ssl_keyfile=files[1]):
                pass
    with pytest.raises(ValueError, match="--ssl-keyfile needs --ssl-certfile"):
        EngineConfig(ssl_keyfile=key)
