"""The load of `aioengine bench serve`: what is asked, when, and what came of it."""

import asyncio
import gc
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import msgspec

from aioengine.bench.client import Client, RequestError
from aioengine.bench.events import Record, error_text, failed, read_answer
from aioengine.bench.stats import Round
from aioengine.errors import EngineError

TEXT: Final = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work government "
    "number night point home water room mother area money story fact month lot right study book "
    "eye job word business issue side kind head house service friend father power hour game line "
    "end member law car city community name president team minute idea kid body information back "
    "parent face others level office door health person art war history party result change"
)
WORDS: Final = TEXT.split()
"""Common ones: most tokenizers have each as one token."""
PROBE_WORDS: Final = 64


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from `least` to `most`, each as likely."""

    least: int
    most: int

    @classmethod
    def parse(cls, flag: str, text: str, at_least: int = 1) -> Self:
        """`128` or `64-256`. Raises ValueError that names the flag."""
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text.strip())
        if match is not None:
            span = cls(int(match[1]), int(match[2] or match[1]))
            if at_least <= span.least <= span.most:
                return span
        raise ValueError(
            f"{flag}: expected a number from {at_least} on such as 128, or a range such as 64-256, "
            f"got {text!r}"
        )

    def draw(self, random_: random.Random) -> int:
        return random_.randint(self.least, self.most)

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked. Equal seeds ask the same; rounds differ, so that no prefix cache helps."""

    num_requests: int
    input_len: Span
    output_len: Span
    prompt_ids: Span
    shared_prefix_len: int
    """Tokens that all prompts of all rounds begin with, beyond `input_len`."""
    seed: int
    is_chat: bool
    is_text: bool
    is_streamed: bool
    fields: dict[str, Any]
    """Of every request's body, such as temperature."""
    concurrency: int | None
    rate: float | None
    """Requests/s; one of the two is None."""


@dataclass(frozen=True, slots=True)
class Server:
    """One of those that are measured."""

    client: Client
    model: str
    tokens_per_word: float = 1.0
    """Of text prompts, as the server counts."""

    @property
    def url(self) -> str:
        return self.client.target.url


@dataclass(frozen=True, slots=True)
class Job:
    """A request, ready to be sent."""

    payload: bytes
    num_asked_tokens: int


def make_jobs(
    server: Server, work: Workload, num_requests: int, round_name: str, side: int
) -> list[Job]:
    """Requests of one round. Lengths follow from seed and round, so both servers get the same;
    tokens from the `side`, too, for the two may be one server."""
    lengths = random.Random(f"lengths {work.seed} {round_name}")
    tokens = random.Random(f"tokens {work.seed} {round_name} {side}")
    prefix = _random_prompt(
        server, work, random.Random(f"prefix {work.seed}"), work.shared_prefix_len
    )
    jobs = []
    for _ in range(num_requests):
        prompt = prefix + _random_prompt(server, work, tokens, work.input_len.draw(lengths))
        num_asked = work.output_len.draw(lengths)
        jobs.append(Job(_payload(server, work, prompt, num_asked), num_asked))
    return jobs


def _random_prompt(server: Server, work: Workload, tokens: random.Random, length: int) -> list[Any]:
    if not work.is_text:
        return [work.prompt_ids.draw(tokens) for _ in range(length)]
    return tokens.choices(WORDS, k=max(1, round(length / server.tokens_per_word))) if length else []


def _payload(server: Server, work: Workload, prompt: list[Any], num_asked: int) -> bytes:
    body: dict[str, Any] = {"model": server.model, "max_tokens": num_asked}
    asked = " ".join(prompt) if work.is_text else prompt
    if work.is_chat:
        body["messages"] = [{"role": "user", "content": asked}]
    else:
        body["prompt"] = asked
    if work.is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    route = "/v1/chat/completions" if work.is_chat else "/v1/completions"
    return server.client.post_payload(route, msgspec.json.encode(body | work.fields))


# --- meeting a server ----------------------------------------------------------------------------


async def meet(client: Client, model: str | None, work: Workload) -> Server:
    """Ask what it serves, and how long text is there. Raises EngineError that names the URL."""
    try:
        if model is None:
            model = await _only_model(client)
        server = Server(client, model)
        return await _with_text_measured(server, work) if work.is_text else server
    except EngineError as error:
        raise EngineError(f"{client.target.url}: {error}") from None


async def _only_model(client: Client) -> str:
    answer = await client.get("/v1/models")
    if answer.status != 200:
        what = (
            f"HTTP {answer.status}: {error_text(answer.body)}" if answer.status else answer.broken
        )
        raise EngineError(f"/v1/models: {what}")
    try:
        return str(msgspec.json.decode(answer.body)["data"][0]["id"])
    except (msgspec.DecodeError, LookupError, TypeError):
        raise EngineError(
            f"/v1/models names no model (--model can): {error_text(answer.body)}"
        ) from None


async def _with_text_measured(server: Server, work: Workload) -> Server:
    """Two prompts of words tell what a word costs, without what a chat template adds. Where the
    server does not say, a word counts as a token."""
    counts: list[int] = []
    for num_words in (PROBE_WORDS // 2, PROBE_WORDS):
        prompt = random.Random(work.seed).choices(WORDS, k=num_words)
        record = read_answer(await server.client.exchange(_payload(server, work, prompt, 1)), 1)
        if record.failure:
            raise EngineError(record.failure)
        if record.num_prompt_tokens is None:
            return server
        counts.append(record.num_prompt_tokens)
    if counts[0] >= counts[1]:
        raise EngineError(
            f"{PROBE_WORDS} words count as no more tokens than half as many: {counts}"
        )
    return Server(server.client, server.model, (counts[1] - counts[0]) / (PROBE_WORDS // 2))


# --- a round -------------------------------------------------------------------------------------


async def run_round(client: Client, jobs: Sequence[Job], work: Workload, round_name: str) -> Round:
    """All requests, at the workload's pace. Failures become records."""
    gc.collect()  # not in the middle
    records: list[Record] = []
    cpu_s, began_s = time.process_time(), time.perf_counter()
    if work.concurrency is not None:
        await _keep_busy(client, iter(jobs), min(work.concurrency, len(jobs)), records)
    else:
        assert work.rate is not None
        arrivals = random.Random(f"arrivals {work.seed} {round_name}")
        await _arrive(client, jobs, work.rate, arrivals, records)
    wall_s = time.perf_counter() - began_s
    return Round(records, wall_s, (time.process_time() - cpu_s) / wall_s)


async def _keep_busy(
    client: Client, jobs: Iterator[Job], num_streams: int, records: list[Record]
) -> None:
    async def stream() -> None:
        records.extend([await _ask(client, job) for job in jobs])  # drawn by all streams

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_streams):
            tasks.create_task(stream(), name=f"stream {number}")


async def _arrive(
    client: Client, jobs: Sequence[Job], rate: float, arrivals: random.Random, records: list[Record]
) -> None:
    async def ask(job: Job) -> None:
        records.append(await _ask(client, job))

    loop = asyncio.get_running_loop()
    due = loop.time()
    async with asyncio.TaskGroup() as tasks:
        for job in jobs:
            due += arrivals.expovariate(rate)
            await asyncio.sleep(max(0.0, due - loop.time()))
            tasks.create_task(ask(job), name="request")


async def _ask(client: Client, job: Job) -> Record:
    sent_s = time.perf_counter()
    try:
        answer = await client.exchange(job.payload)
    except RequestError as error:
        return failed(job.num_asked_tokens, sent_s, time.perf_counter(), str(error))
    return read_answer(answer, job.num_asked_tokens)
