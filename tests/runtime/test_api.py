"""Routes, states, keys and the form of errors, over HTTP."""

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
from support.http_server import CHAT, COMPLETIONS, MESSAGES, PROMPT, serving
from support.mailbox import settle
from support.tiny_model import EOS_ID, MODEL_NAME, ids

from aioengine import limits
from aioengine.api.server import HttpServer
from aioengine.control.walltime import Walltime
from aioengine.errors import StartupError

V1 = [
    ("POST", COMPLETIONS, PROMPT),
    ("POST", CHAT, MESSAGES),
    ("GET", "/v1/models", None),
    ("GET", f"/v1/models/{MODEL_NAME}", None),
    ("GET", "/tokenizer_info", None),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [97]}),
]

# --- states --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("states", "is_draining", "readyz", "health", "status", "v1"),
    [
        (["starting"], False, 503, 503, "starting", 503),
        (["starting", "ready"], False, 503, 503, "starting", 503),
        (["ready"], False, 200, 200, "ok", 200),
        (["ready", "failed"], False, 200, 200, "degraded", 200),
        (["ready"], True, 503, 200, "draining", 503),
        (["ready", "failed"], True, 503, 200, "draining", 503),
        (["failed", "failed"], False, 503, 503, "failed", 503),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else None,
)
async def test_every_state(
    states: list[str], is_draining: bool, readyz: int, health: int, status: str, v1: int
) -> None:
    async with serving(states=states) as server:
        if is_draining:
            server.front_end.begin_drain()
        assert (await server.get("/livez")).status == 200
        assert (await server.get("/readyz")).status == readyz
        found = await server.get("/health")
        assert (found.status, found.json["status"]) == (health, status)
        assert found.json.get("causes") == (["its cause"] * states.count("failed") or None)
        assert (await server.get("/server_info")).json["status"] == status
        assert (await server.get("/metrics")).status == 200
        for method, path, body in V1[2:]:
            answer = await server.ask(method, path, json=body)
            assert answer.status == v1, path
        for method, path, body in V1[:2]:
            if v1 == 503:
                answer = await server.ask(method, path, json=body)
                assert answer.status == 503
                assert answer.error["type"] == "service_unavailable_error"
                assert int(answer.headers["Retry-After"]) > 0


async def test_the_state_comes_before_the_body() -> None:
    """Also while the model is still being read."""
    async with serving(has_model=False) as server:
        answer = await server.post(COMPLETIONS, b"{")
        assert (answer.status, answer.error["code"]) == (503, "starting")
        assert (await server.get("/server_info")).json["model"] is None


async def test_too_many_requests_are_refused_for_now() -> None:
    async with serving(max_concurrent_requests=2) as server:
        answer = await server.post(COMPLETIONS, {**PROMPT, "n": 3})
        assert answer.status == 503
        assert "--max-concurrent-requests 2" in answer.error["message"]
        assert answer.headers["Retry-After"]


async def test_a_drain_for_the_end_of_a_job_says_when() -> None:
    walltime = Walltime(1000.0, 60.0, lambda: 957.5)
    async with serving(walltime=walltime) as server:
        server.front_end.begin_drain(for_walltime=True)
        assert (await server.get("/health")).json == {
            "status": "draining",
            "causes": [walltime.cause],
        }
        answer = await server.post(COMPLETIONS, PROMPT)
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert answer.error["message"] == walltime.cause
        assert answer.headers["Retry-After"] == "43"


@pytest.mark.parametrize(
    ("path", "asks", "asks_no_more"),
    [
        (COMPLETIONS, {**PROMPT, "max_tokens": 50}, PROMPT),
        (CHAT, {**MESSAGES, "max_completion_tokens": 50}, MESSAGES),
    ],
)
async def test_an_answer_that_the_job_would_not_see(
    path: str, asks: dict[str, Any], asks_no_more: dict[str, Any]
) -> None:
    """Only what the client's own max_tokens says is held against it."""
    async with serving(walltime=Walltime(1000.0, 0.0, lambda: 965.0)) as server:
        for token_s in (1.0, 0.1):
            server.front_end.metrics.pace.first_token(token_s)
            server.front_end.metrics.pace.next_tokens(1, token_s)
        answer = await server.post(path, asks)
        assert answer.status == 503
        assert "50 tokens take about 48 s" in answer.error["message"]
        assert answer.headers["Retry-After"] == "35"
        async with asyncio.TaskGroup() as tasks:
            taken = tasks.create_task(server.post(path, asks_no_more))
            await server.play("ok")
        assert taken.result().status == 200


# --- routes --------------------------------------------------------------------------------------


async def test_models_and_version() -> None:
    async with serving() as server:
        (card,) = (await server.get("/v1/models")).json["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == (MODEL_NAME, "model", 200)
        assert (await server.get(f"/v1/models/{MODEL_NAME}")).json == card
        missing = await server.get("/v1/models/meta/other")
        assert (missing.status, missing.error["code"]) == (404, "model_not_found")
        assert (await server.get("/version")).json["version"]


async def test_server_info_shows_the_grid() -> None:
    async with serving(states=["ready", "failed"]) as server:
        server.leaders[0].report(num_running=2, num_blocks=64, num_free_blocks=60, last_seq=9)
        await settle()
        body = (await server.get("/server_info")).json
        assert body["sizes"]["dp"] == 2
        good, bad = body["replicas"]
        assert (good["state"], good["last_step"], good["num_requests_running"]) == ("ready", 9, 2)
        assert [rank["rank"] for rank in good["ranks"]] == [0]
        assert (bad["state"], bad["cause"], bad["ranks"]) == ("failed", "its cause", [])


async def test_metrics_are_in_prometheus_form() -> None:
    async with serving() as server:
        answer = await server.get("/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'aioengine:num_requests_running{engine="0"} 0.0' in answer.text


async def test_tokenize_and_detokenize() -> None:
    async with serving() as server:
        body = {"prompt": "hé", "return_token_strs": True}
        answer = (await server.post("/tokenize", body)).json
        assert answer["tokens"] == list(ids("hé"))
        assert (answer["count"], answer["max_model_len"]) == (3, 200)
        assert answer["token_strs"] == [
            "h",
            "\N{REPLACEMENT CHARACTER}",
            "\N{REPLACEMENT CHARACTER}",
        ]
        chat = (await server.post("/tokenize", MESSAGES)).json
        assert chat["tokens"] == list(ids("<user>hello\n<assistant>"))
        assert chat["token_strs"] is None
        text = (await server.post("/detokenize", {"tokens": [*ids("hé"), EOS_ID]})).json["prompt"]
        assert text == "hé</s>"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "<user>hello\n<assistant>"),
        ({"add_generation_prompt": False}, "<user>hello\n"),
        ({"add_generation_prompt": False, "continue_final_message": True}, "<user>hello"),
        ({"chat_template_kwargs": {"novel": 1}}, "<user>hello\n<assistant>"),
    ],
)
async def test_conversations_are_tokenized_as_chats_are(fields: dict[str, Any], text: str) -> None:
    async with serving() as server, asyncio.TaskGroup() as tasks:
        counted = (await server.post("/tokenize", {**MESSAGES, **fields})).json
        asked = tasks.create_task(server.post(CHAT, {**MESSAGES, **fields}))
        (added,) = await server.play("x")
        assert (await asked).status == 200
        assert counted["tokens"] == list(added.token_ids) == list(ids(text))
        strict = {**MESSAGES, **fields, "chat_template_kwargs": {"strict": True}}
        for path in ("/tokenize", CHAT):
            answer = await server.post(path, strict)
            assert (answer.status, answer.error["param"]) == (400, "chat_template_kwargs")


async def test_absent_routes_and_methods() -> None:
    async with serving() as server:
        for path in ("/", "/v1", "/v1/embeddings", "/metrics/", "/%00", "/v1/models/"):
            answer = await server.get(path)
            assert (answer.status, answer.error["type"]) == (404, "not_found_error"), path
        for method, path, allowed in (
            ("GET", COMPLETIONS, "POST"),
            ("DELETE", CHAT, "POST"),
            ("POST", "/health", "GET, HEAD"),
        ):
            answer = await server.ask(method, path)
            assert answer.status == 405
            assert answer.error["message"] == f"{path} does not take {method}"
            assert answer.headers["Allow"] == allowed


async def test_routes_below_a_root_path(tmp_path: Path) -> None:
    file = tmp_path / "endpoint"
    async with serving(root_path="/llm", api_key=("key",), endpoint_file=str(file)) as server:
        assert file.read_text() == server.url + "\n"
        assert server.url.endswith("/llm")
        assert (await server.get("/llm/livez")).status == 200
        assert (await server.get("/llm/version")).status == 401
        assert (await server.get("/livez")).status == 401  # no route, so closed
    assert not file.exists()


async def test_every_interface_is_announced_by_the_name_of_the_host(tmp_path: Path) -> None:
    file = tmp_path / "endpoint"
    async with serving(host="0.0.0.0", endpoint_file=str(file)) as server:
        port = server.url.rpartition(":")[2]
        assert file.read_text() == f"http://{socket.gethostname()}:{port}\n"


async def test_a_port_that_is_taken() -> None:
    async with serving() as server:
        port = int(server.url.rsplit(":", 1)[1])
        server.api.config = type(server.api.config)(port=port)
        second = HttpServer(server.api)
        with pytest.raises(StartupError, match=r"--port .* in use"):
            await second.open()
        await second.close()


# --- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "key",
        "Bearer",
        "Bearer ",
        "bearer key",
        "Bearer other",
        "Bearer key ",
        "Basic key",
    ],
)
async def test_without_the_key_only_open_routes_answer(header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with serving(api_key=("kéy",)) as server:
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert (await server.get(path, headers=headers)).status == 200, path
        for path in ("/version", "/server_info", "/nowhere"):
            answer = await server.get(path, headers=headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key"), path
        for method, path, body in V1:
            answer = await server.ask(method, path, json=body, headers=headers)
            assert (answer.status, answer.error["type"]) == (401, "authentication_error"), path


async def test_with_the_key_every_route_answers() -> None:
    async with serving(api_key=("kéy",), metrics_require_key=True) as server:
        headers = {"Authorization": "Bearer kéy"}
        assert (await server.get("/metrics")).status == 401
        for path in ("/metrics", "/version", "/v1/models"):
            assert (await server.get(path, headers=headers)).status == 200, path


# --- errors of transport and of ours -------------------------------------------------------------


async def test_a_body_over_the_limit() -> None:
    async with serving() as server:
        answer = await server.post(COMPLETIONS, b"x" * (8 * 2**20 + 1))
        assert (answer.status, answer.error["type"]) == (413, "invalid_request_error")
        assert "8388608" in answer.error["message"]
        assert (await server.get("/livez")).status == 200


async def test_an_error_of_ours_is_logged_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server:
        monkeypatch.setattr(server.front_end, "generate", lambda *_: 1 / 0)
        answer = await server.post(COMPLETIONS, PROMPT)
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert "division" not in answer.text
    assert "division by zero" in caplog.text


async def test_unknown_fields_are_ignored_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "aioengine")
    body = {**PROMPT, "novel": {"a": [1]}, "x" * 5000: 0, "max_tokens": 1}
    async with serving() as server, asyncio.TaskGroup() as tasks:
        for count in (1, 2):
            asked = tasks.create_task(server.post(COMPLETIONS, body))
            request = (await server.leader.added(count))[-1]
            server.leader.answer(request, ids("x"), "length")
            assert (await asked).status == 200
    lines = [r.getMessage() for r in caplog.records if "nobody knows" in r.getMessage()]
    assert lines == [f"ignoring request fields that nobody knows: 'novel', {'x' * 64!r}"]


async def test_names_of_unknown_fields_fill_neither_the_log_nor_the_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "aioengine")
    async with serving() as server:
        for size, count in ((1_000_000, 8), (4, 90), (5, 90)):
            names = {f"{i:03}".ljust(size, "x"): 0 for i in range(count)}
            answer = await server.post(COMPLETIONS, json.dumps({"prompt": "", **names}).encode())
            assert answer.error["param"] == "prompt"
        known = server.api.unknown_fields
        assert len(known) == limits.MAX_LOGGED_FIELDS
        assert max(map(len, known)) <= 64
    lines = [r.getMessage() for r in caplog.records if "nobody knows" in r.getMessage()]
    assert len(lines) == 3
    assert max(map(len, lines)) < 100 * 70


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_fields_without_effect_are_known(path: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioengine")
    fields = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "stream_options": {"include_obfuscation": False},
    }
    body = {**(PROMPT if path == COMPLETIONS else MESSAGES), **fields}
    async with serving() as server, asyncio.TaskGroup() as tasks:
        asked = tasks.create_task(server.post(path, body))
        await server.play("x")
        assert (await asked).status == 200
    assert "nobody knows" not in caplog.text


async def test_a_client_that_sends_half_a_body_and_leaves(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        port = int(server.url.rsplit(":", 1)[1])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
        writer.write(head.encode() + json.dumps(PROMPT).encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await server.get("/livez")).status == 200
        assert not server.front_end.num_live
    assert "failed" not in caplog.text
