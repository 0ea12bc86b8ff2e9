"""Put load on an OpenAI-compatible server and time its answers; with --vs on two, by turns.

Inter-token latency is the gap between two events with tokens, as a reader of the stream sees it;
time per output token divides by the server's own count of tokens. Requests that warm the server up
do not count. Exit status 1 when any request failed.
"""

import argparse
import asyncio
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import uvloop

from aioengine.bench.client import Client, Target
from aioengine.bench.load import Server, Span, Workload, make_jobs, meet, run_round
from aioengine.bench.serve_report import print_comparison, print_summary, to_json
from aioengine.bench.slow_readers import reading_beside
from aioengine.bench.stats import Round, summarize
from aioengine.errors import EngineError
from aioengine.flags import CommandParser

PROG: Final = "aioengine bench serve"
DEFAULT_CONCURRENCY: Final = 16
REQUESTS_PER_STREAM: Final = 4
REQUESTS_WITH_RATE: Final = 100
WARM_UP_WITH_RATE: Final = 4
VS_ROUNDS: Final = 5
PLOT_SUFFIXES: Final = (".svg", ".png")
PLOT_MODULE: Final = "aioengine.bench.plot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure, checked."""

    targets: tuple[Target, ...]
    """One, or two that take turns."""
    model: str | None
    work: Workload
    num_warm_up: int
    num_rounds: int
    num_slow_readers: int
    timeout_s: float


def configure(parser: CommandParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", required=True, help="such as http://127.0.0.1:8000")
    server.add_argument("--vs", metavar="URL", help="a second server, to take turns with the first")
    server.add_argument("--model", metavar="NAME", help="of both servers [what /v1/models says]")
    server.add_argument("--api-key", metavar="KEY", help="sent as Bearer token")
    server.add_argument("--chat", action="store_true", default=False, help="chat completions")
    server.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="of each request, seconds [600]"
    )
    load = parser.add_argument_group("load")
    pace = load.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency", type=int, metavar="N", help=f"streams at a time [{DEFAULT_CONCURRENCY}]"
    )
    pace.add_argument("--rate", type=float, metavar="R", help="requests/s, arriving at random")
    load.add_argument(
        "--num-requests",
        type=int,
        metavar="N",
        help=f"per round [{REQUESTS_PER_STREAM} per stream, {REQUESTS_WITH_RATE} with --rate]",
    )
    load.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help=f"figures are medians of them [1; {VS_ROUNDS} with --vs]",
    )
    load.add_argument(
        "--warmup",
        type=int,
        metavar="N",
        help=f"requests that do not count [one per stream, {WARM_UP_WITH_RATE} with --rate]",
    )
    load.add_argument(
        "--slow-readers",
        type=int,
        default=0,
        metavar="N",
        help="so many more clients with long answers, who read slowly in the rounds of --vs "
        "(then --url, if not given), and as fast as they can in the others [0]",
    )
    load.add_argument("--seed", type=int, default=0, metavar="N", help="of all that is drawn [0]")
    _add_request_flags(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="FILE", help="all figures, as one object")
    results.add_argument("--plot", metavar="FILE.svg|png", help="needs the extra [bench]")


def _add_request_flags(parser: CommandParser) -> None:
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--input-len", default="128", metavar="N|N-M", help="tokens of a prompt [128]"
    )
    requests.add_argument(
        "--output-len", default="128", metavar="N|N-M", help="tokens of an answer [128]"
    )
    requests.add_argument(
        "--shared-prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens before all prompts [0]",
    )
    requests.add_argument(
        "--prompt-ids", default="100-500", metavar="N-M", help="ids that prompts are of [100-500]"
    )
    requests.add_argument(
        "--text",
        action="store_true",
        default=False,
        help="prompts of words, of about that many tokens; always so with --chat",
    )
    requests.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="[on]"
    )
    requests.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly --output-len tokens [on]",
    )
    requests.add_argument("--temperature", type=float, default=0.0, metavar="T", help="[0]")
    requests.add_argument(
        "--extra-body", metavar="JSON", default="{}", help="more fields, such as '{\"top_p\": 0.9}'"
    )


def run(args: argparse.Namespace) -> int:
    given = vars(args)
    try:
        plan = read_plan(given)
        plot = _plotter(given.get("plot"))
        _check_writable("--json", given.get("json"))
    except ValueError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            servers, rounds = runner.run(measure(plan))
    except EngineError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        return 130
    summaries = [summarize(each) for each in rounds]
    for server, summary in zip(servers, summaries, strict=True):
        print_summary(server, summary, plan.num_rounds)
    if len(servers) == 2:
        print_comparison(servers, rounds)
    if "json" in given:
        Path(given["json"]).write_bytes(to_json(plan.work, servers, rounds))
    if plot is not None:
        plot([server.url for server in servers], rounds, given["plot"])
    return int(any(summary.failures for summary in summaries))


# --- the command line ----------------------------------------------------------------------------


def read_plan(given: dict[str, Any]) -> Plan:
    """Raises ValueError that names the flag."""
    key = given.get("api_key")
    targets = [Target.parse("--url", given["url"], key)]
    if "vs" in given:
        targets.append(Target.parse("--vs", given["vs"], key))
    elif given["slow_readers"]:
        targets.append(targets[0])
    rate = given.get("rate")
    concurrency = None if rate is not None else given.get("concurrency", DEFAULT_CONCURRENCY)
    for name in ("concurrency", "num_requests", "rounds"):
        if given.get(name, 1) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be 1 or more, found {given[name]}")
    for name in ("warmup", "shared_prefix_len", "temperature", "slow_readers"):
        if given.get(name, 0) < 0:
            raise ValueError(f"--{name.replace('_', '-')} must be 0 or more, found {given[name]}")
    for name in ("rate", "timeout"):
        if not 0 < given.get(name, 1) < float("inf"):
            raise ValueError(f"--{name} must be above 0, found {given[name]:g}")
    in_load = REQUESTS_WITH_RATE if concurrency is None else REQUESTS_PER_STREAM * concurrency
    work = Workload(
        num_requests=given.get("num_requests", in_load),
        input_len=Span.parse("--input-len", given["input_len"]),
        output_len=Span.parse("--output-len", given["output_len"]),
        prompt_ids=Span.parse("--prompt-ids", given["prompt_ids"], at_least=0),
        shared_prefix_len=given["shared_prefix_len"],
        seed=given["seed"],
        is_chat=given["chat"],
        is_text=given["text"] or given["chat"],
        is_streamed=given["stream"],
        fields=_fields(given),
        concurrency=concurrency,
        rate=rate,
    )
    return Plan(
        targets=tuple(targets),
        model=given.get("model"),
        work=work,
        num_warm_up=given.get("warmup", concurrency or WARM_UP_WITH_RATE),
        num_rounds=given.get("rounds", VS_ROUNDS if len(targets) == 2 else 1),
        num_slow_readers=given["slow_readers"],
        timeout_s=given["timeout"],
    )


def _fields(given: dict[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": given["temperature"]}
    if given["ignore_eos"]:
        fields["ignore_eos"] = True
    try:
        return fields | msgspec.json.decode(given["extra_body"], type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ValueError(f"--extra-body: {error}, got {given['extra_body']!r}") from None


def _plotter(path: str | None) -> Any:
    """What draws, checked before minutes of measuring. The library is an extra."""
    if path is None:
        return None
    if not path.endswith(PLOT_SUFFIXES):
        raise ValueError(f"--plot: expected a file {' or '.join(PLOT_SUFFIXES)}, got {path!r}")
    _check_writable("--plot", path)
    try:
        return importlib.import_module(PLOT_MODULE).plot
    except ImportError as error:
        raise ValueError(f"--plot: {error}; pip install 'aioengine[bench]'") from None


def _check_writable(flag: str, path: str | None) -> None:
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise ValueError(f"{flag}: there is no directory {Path(path).resolve().parent}")


# --- measuring -----------------------------------------------------------------------------------


async def measure(plan: Plan) -> tuple[list[Server], list[list[Round]]]:
    """The servers, and the rounds of each. Raises EngineError when one cannot be measured."""
    clients = [Client(target, plan.timeout_s) for target in plan.targets]
    try:
        servers = [await meet(client, plan.model, plan.work) for client in clients]
        for side, server in enumerate(servers):
            jobs = make_jobs(server, plan.work, plan.num_warm_up, "warm-up", side)
            warm_up = await run_round(server.client, jobs, plan.work, "warm-up")
            if jobs and all(record.failure for record in warm_up.records):
                raise EngineError(f"{server.url}: {warm_up.records[0].failure}")
        rounds: list[list[Round]] = [[] for _ in servers]
        for number in range(plan.num_rounds):
            name = f"round {number}"
            # Who is first changes, so that what a turn leaves behind meets both.
            for side in _turns(len(servers), number):
                jobs = make_jobs(servers[side], plan.work, plan.work.num_requests, name, side)
                async with reading_beside(
                    servers[side], plan.work, plan.num_slow_readers, name, slowly=side == 1
                ):
                    found = await run_round(servers[side].client, jobs, plan.work, name)
                rounds[side].append(found)
        return servers, rounds
    finally:
        for client in clients:
            client.close()


def _turns(num_servers: int, number: int) -> Sequence[int]:
    order = range(num_servers)
    return order if number % 2 == 0 else order[::-1]
