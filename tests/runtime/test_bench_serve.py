"""`aioengine bench serve` against servers that behave, and against those that do not."""

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from support.launching import free_port
from support.scripted_server import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    Asked,
    Script,
    ScriptedServer,
    chunk,
    event,
    scripted_server,
    tokens,
    usage,
)

from aioengine.bench.events import Record
from aioengine.bench.serve import configure, measure, read_plan
from aioengine.bench.serve_report import print_comparison, print_summary, to_json
from aioengine.bench.stats import Round, summarize
from aioengine.cli.main import main
from aioengine.errors import EngineError
from aioengine.flags import CommandParser


def plan_of(*line: str) -> Any:
    parser = CommandParser()
    configure(parser)
    return read_plan(vars(parser.parse_args(line)))


async def ask(script: Script, *line: str) -> tuple[list[Record], ScriptedServer]:
    """The records of one round, without warm-up unless the line says so."""
    async with scripted_server(script) as server:
        _, [[one]] = await measure(plan_of("--url", server.url, "--warmup", "0", *line))
        return list(one.records), server


async def ask_one(script: Script, *line: str) -> Record:
    (record,), _ = await ask(script, "--num-requests", "1", "--output-len", "3", *line)
    return record


async def answer_well(asked: Asked) -> None:
    n = asked.body["max_tokens"]
    if asked.body.get("stream"):
        counted = usage(len(asked.body["prompt"]), n)
        await asked.send_stream(*tokens(["a"] * n), counted, DONE)
    else:
        counts = {"prompt_tokens": len(asked.body["prompt"]), "completion_tokens": n}
        await asked.send_json(200, {"choices": [{"text": "a" * n}], "usage": counts})


# --- well-behaved servers ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["--stream", "--no-stream"])
async def test_streams_keep_their_connections(mode: str) -> None:
    line = [
        "--concurrency",
        "3",
        "--num-requests",
        "12",
        "--input-len",
        "4-9",
        "--output-len",
        "2-5",
    ]
    records, server = await ask(answer_well, *line, mode)
    assert server.num_connections == 3
    assert len(records) == 12
    for record in records:
        assert not record.failure
        assert record.is_exact
        assert 4 <= (record.num_prompt_tokens or 0) <= 9
        assert 2 <= record.num_output_tokens == record.num_asked_tokens <= 5
        assert len(record.token_s) == (record.num_output_tokens if mode == "--stream" else 0)
        assert record.sent_s < record.end_s


async def test_what_is_asked() -> None:
    line = ["--api-key", "secret", "--prompt-ids", "7-8", "--shared-prefix-len", "5"]
    line += ["--input-len", "20", "--num-requests", "2", "--extra-body", '{"top_p": 0.5}']
    _, server = await ask(answer_well, *line)
    first, second = (asked.body for asked in server.asked)
    assert server.asked[0].path == "/v1/completions"
    assert server.asked[0].headers["authorization"] == "Bearer secret"
    assert (first["model"], first["max_tokens"]) == ("m", 128)
    assert (first["temperature"], first["ignore_eos"], first["top_p"]) == (0, True, 0.5)
    assert first["stream_options"] == {"include_usage": True}
    assert len(first["prompt"]) == 25
    assert set(first["prompt"]) == {7, 8}
    assert first["prompt"][:5] == second["prompt"][:5]
    assert first["prompt"] != second["prompt"]


async def test_arrivals_at_a_rate_do_not_wait_for_answers() -> None:
    """The third request answers all of them."""
    waiting: list[Asked] = []

    async def answer_together(asked: Asked) -> None:
        waiting.append(asked)
        if len(waiting) == 3:
            for each in waiting:
                await answer_well(each)

    records, _ = await ask(answer_together, "--rate", "500", "--num-requests", "3")
    assert [record.failure for record in records] == [""] * 3


async def test_two_servers_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def named(name: str) -> Script:
        async def answer(asked: Asked) -> None:
            order.append(name)
            await answer_well(asked)

        return answer

    async with (
        scripted_server(named("a"), "ma") as a,
        scripted_server(named("b"), "mb") as b,
    ):
        line = ["--url", a.url, "--vs", f"{b.url}/v1/", "--rounds", "3", "--num-requests", "2"]
        plan = plan_of(*line, "--concurrency", "1", "--input-len", "4-400")
        servers, rounds = await measure(plan)
    assert "".join(order) == "abaabbbbaaaabb"  # warm-up, then rounds
    assert [server.model for server in servers] == ["ma", "mb"]
    bodies = [asked.body for asked in a.asked[1:] + b.asked[1:]]
    prompts = {tuple(body["prompt"]) for body in bodies}
    assert len(prompts) == len(bodies) == 12
    lengths = [[len(asked.body["prompt"]) for asked in each.asked] for each in (a, b)]
    assert lengths[0] == lengths[1]
    for server, each in zip(servers, rounds, strict=True):
        print_summary(server, summarize(each), 3)
    print_comparison(servers, rounds)
    shown = capsys.readouterr().out
    for text in (
        "6 of 6 requests in 3 rounds",
        "time to first token, ms, median",
        "first / second",
    ):
        assert text in shown
    found = json.loads(to_json(plan.work, servers, rounds))
    assert [len(each["rounds"]) for each in found["servers"]] == [3, 3]
    assert found["comparison"][0]["name"] == "requests/s"


async def test_slow_readers_beside_every_second_round() -> None:
    """They ask for the same in all rounds; what they read tells them apart."""
    num_sent: list[int] = []

    async def answer(asked: Asked) -> None:
        if "n" not in asked.body:
            await answer_well(asked)
            return
        num_sent.append(0)
        await asked.send(STREAM_HEAD)
        with contextlib.suppress(ConnectionError, TimeoutError):
            for _ in range(4000):
                async with asyncio.timeout(0.5):
                    await asked.send(chunk(bytes(1000)))
                num_sent[-1] += 1

    async with scripted_server(answer) as server:
        line = ["--url", server.url, "--rounds", "2", "--num-requests", "200", "--warmup", "0"]
        plan = plan_of(*line, "--concurrency", "1", "--slow-readers", "1")
        _, rounds = await measure(plan)
    readers = [asked.body for asked in server.asked if "n" in asked.body]
    assert [body["n"] for body in readers] == [16] * 4
    assert len({len(body["prompt"]) for body in readers}) == 1
    fast, slow = sorted(num_sent[:1] + num_sent[3:]), num_sent[1:3]
    assert min(fast) > max(slow), num_sent
    assert [len(each) for each in rounds] == [2, 2]


async def test_a_slow_reader_that_is_not_served_is_an_error() -> None:
    async def refuse(asked: Asked) -> None:
        if "n" not in asked.body:
            await answer_well(asked)
        else:
            await asked.send_json(503, {"error": {}})

    async with scripted_server(refuse) as server:
        plan = plan_of("--url", server.url, "--rounds", "1", "--slow-readers", "1")
        with pytest.raises(EngineError, match=r"a slow reader got 'HTTP/1\.1 503"):
            await measure(plan)


# --- other servers -------------------------------------------------------------------------------


async def test_bytes_may_come_in_any_pieces() -> None:
    body = b"".join(tokens(["a", "data: b\n\ndata:", "c"])) + usage(9, 3) + DONE

    async def answer(asked: Asked) -> None:
        if asked.number == 0:  # byte by byte, in chunks and in writes
            stream = STREAM_HEAD + b"".join(chunk(bytes([byte])) for byte in body) + LAST_CHUNK
            for byte in stream:
                await asked.send(bytes([byte]))
        elif asked.number == 1:  # everything in one write
            await asked.send(STREAM_HEAD + chunk(body) + LAST_CHUNK)
        else:  # carriage returns, comments, no space, until the connection closes
            crlf = b": ping\r\n\r\n" + body.replace(b"\n", b"\r\n").replace(b"data: ", b"data:")
            await asked.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + crlf)
            asked.writer.close()

    records, _ = await ask(answer, "--concurrency", "1", "--num-requests", "3", "--output-len", "3")
    for record in records:
        assert not record.failure
        assert (len(record.token_s), record.num_output_tokens) == (3, 3)
        assert record.num_prompt_tokens == 9


async def test_without_done_and_without_usage_events_count() -> None:
    record = await ask_one(lambda asked: asked.send_stream(*tokens("abc")))
    assert (record.failure, record.num_output_tokens, record.is_exact) == ("", 3, False)


async def test_an_end_without_a_token_is_none() -> None:
    """As llama.cpp ends; and as a server that leaves out what has no text yet."""
    end = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    record = await ask_one(
        lambda asked: asked.send_stream(*tokens("abc", None), end, usage(1, 3), DONE)
    )
    assert (len(record.token_s), record.num_output_tokens) == (3, 3)
    record = await ask_one(
        lambda asked: asked.send_stream(*tokens("ab", None), end, usage(1, 3), DONE)
    )
    assert (len(record.token_s), record.num_output_tokens) == (3, 3)


async def test_a_single_token_without_text() -> None:
    end = event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    record = await ask_one(lambda asked: asked.send_stream(end, usage(1, 1), DONE))
    assert (record.failure, len(record.token_s), record.num_output_tokens) == ("", 1, 1)


async def test_an_error_may_be_all_that_comes() -> None:
    error = event({"error": {"message": "no room"}})
    record = await ask_one(lambda asked: asked.send_stream(error, DONE))
    assert record.failure == "error event: no room"


async def test_the_role_of_a_chat_is_no_token() -> None:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": text} for text in "abc"]
    events = [event({"choices": [{"delta": delta}]}) for delta in deltas]
    end = event({"choices": [{"delta": {}, "finish_reason": "length"}]})
    arrived = asyncio.Event()

    async def answer(asked: Asked) -> None:
        words = len(asked.body["messages"][0]["content"].split())
        if asked.body["max_tokens"] == 1:  # what is a word?
            await asked.send_stream(*events[:2], end, usage(10 + 2 * words, 1), DONE)
            return
        assert words == 10
        await asked.send_stream(*events, end, usage(30, 3), DONE)
        arrived.set()

    record = await ask_one(answer, "--chat", "--input-len", "20")
    assert arrived.is_set()
    assert (record.failure, len(record.token_s), record.num_prompt_tokens) == ("", 3, 30)


# --- failures ------------------------------------------------------------------------------------


async def fail(asked: Asked) -> None:
    """Every request in another way."""
    match asked.number:
        case 0:
            await asked.send_json(503, {"error": {"message": "too many\nrequests"}})
        case 1:
            await asked.send(STREAM_HEAD + chunk(b"".join(tokens("ab", None))))
            asked.close()
        case 2:
            error = event({"error": {"message": "a rank is lost"}})
            await asked.send_stream(*tokens("ab", None), error, DONE)
        case 3:
            await asked.send_stream(*tokens("ab", None))
        case 4 | 5:  # on a connection that was idle the client tries once more
            asked.close()
        case 6:
            await asked.send(b"SSH-2.0 hello\r\n\r\n")
        case 7:
            await asked.send_json(200, {"detail": "not here"})
        case 8:
            await asked.send_stream(DONE)
        case 9:
            await asked.send(STREAM_HEAD)  # and nothing follows
        case _:
            await answer_well(asked)


async def test_failures_have_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["--concurrency", "1", "--num-requests", "10", "--output-len", "4", "--timeout", "0.5"]
    async with scripted_server(fail) as server:
        plan = plan_of("--url", server.url, "--warmup", "0", *line)
        servers, [[one]] = await measure(plan)
    reasons = [record.failure for record in one.records]
    assert reasons[:5] == [
        "HTTP 503: too many requests",
        "the server closed the connection, after 2 events",
        "error event: a rank is lost",
        "the stream ended early, after 2 events",
        "the server closed the connection",
    ]
    assert reasons[5].startswith("what came is no HTTP")
    assert reasons[6:] == [
        "no completion: not here",
        "a stream without tokens",
        "no complete answer within 0.5 s",
        "",
    ]
    print_summary(servers[0], summarize([one]), 1)
    shown = capsys.readouterr().out
    assert "1 of 10 requests" in shown
    assert "failed 1×: error event: a rank is lost" in shown


async def test_an_idle_connection_that_the_server_closes_is_no_failure() -> None:
    async def answer_once(asked: Asked) -> None:
        await answer_well(asked)
        asked.close()

    records, server = await ask(answer_once, "--concurrency", "1", "--num-requests", "3")
    assert [record.failure for record in records] == [""] * 3
    assert server.num_connections >= 3


async def test_a_server_that_cannot_be_measured_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"http://127.0.0.1:\d+: no connection"):
        await measure(plan_of("--url", f"http://127.0.0.1:{free_port()}"))
    async with scripted_server(lambda asked: asked.send_json(400, {"message": "no ids"})) as server:
        with pytest.raises(EngineError, match="HTTP 400: no ids"):
            await measure(plan_of("--url", server.url))
        with pytest.raises(EngineError, match="HTTP 400: no ids"):
            await measure(plan_of("--url", server.url, "--text"))


async def test_ctrl_c_ends_it() -> None:
    is_asked = asyncio.Event()

    async def hang(asked: Asked) -> None:
        is_asked.set()

    async with scripted_server(hang) as server:
        command = ["-m", "aioengine.cli", "bench", "serve", "--url", server.url]
        bench = await asyncio.create_subprocess_exec(
            sys.executable, *command, stderr=asyncio.subprocess.PIPE
        )
        await is_asked.wait()
        bench.send_signal(signal.SIGINT)
        _, stderr = await bench.communicate()
    assert bench.returncode == 130
    assert stderr.decode() == "aioengine bench serve: interrupted\n"


# --- the command line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--url", "localhost:8000"], "--url: expected a URL such as http://127.0.0.1:8000, got"),
        (["--vs", "http://x:y"], "--vs: expected a URL"),
        (["--concurrency", "0"], "--concurrency must be 1 or more, found 0"),
        (["--rate", "nan"], "--rate must be above 0, found nan"),
        (["--warmup", "-1"], "--warmup must be 0 or more, found -1"),
        (["--input-len", "9-4"], "--input-len: expected a number from 1 on such as 128, or a"),
        (["--output-len", "0"], "--output-len: expected"),
        (["--prompt-ids", "x"], "got 'x'"),
        (["--extra-body", "[1]"], "--extra-body: Expected `object`, got `array`"),
        (["--plot", "x.pdf"], "--plot: expected a file .svg or .png, got 'x.pdf'"),
        (["--json", "/nowhere/x.json"], "--json: there is no directory /nowhere"),
    ],
)
def test_a_wrong_line_is_refused(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    url = [] if "--url" in line else ["--url", "http://127.0.0.1:9"]
    assert main(["bench", "serve", *url, *line]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_plots(suffix: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from_bench = pytest.importorskip("aioengine.bench.plot")
    streamed = Record(2, 0.0, 0.3, token_s=[0.1, 0.3], num_output_tokens=2)
    whole = Record(2, 0.0, 0.3, num_output_tokens=2)
    rounds = [[Round([streamed, whole], 0.3, 0.1)], [Round([], 0.1, 0.1)]]
    path = tmp_path / f"x.{suffix}"
    from_bench.plot(["a", "b"], rounds, str(path))
    assert path.stat().st_size > 1000
