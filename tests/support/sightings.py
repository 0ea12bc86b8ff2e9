"""What clients see of their requests, right or wrong, and requests whose tokens are known."""

import asyncio
import json
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import aiohttp
from support.launching import STORIES, Launch, post

GIVE_UP_S: Final = 120.0
"""For any request: what takes longer counts as hung."""
TIE_GAP: Final = 1e-3
"""Log probabilities this close may change places with the layout or the batch."""

Ending = Literal["finished", "left", "error", "refused", "reset", "unreachable", "hung"]
"""`left` by the client itself; `error` an error event of a stream, or a status that is none of
these; `refused` a 503 with Retry-After; `reset` a connection that ended in the middle."""


@dataclass(frozen=True, slots=True)
class KnownRequest:
    """A greedy request and the tokens that it must give."""

    body: dict[str, Any]
    token_ids: list[int]

    def first(self, max_tokens: int) -> "KnownRequest":
        """The same, shorter."""
        return KnownRequest({**self.body, "max_tokens": max_tokens}, self.token_ids[:max_tokens])


@dataclass(slots=True)
class Sighting:
    """One request as its client saw it. Times are `time.monotonic()`."""

    request: KnownRequest
    started: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    last_token: float = 0.0
    ending: Ending = "hung"
    message: str = ""
    """Of the error, where there was one."""
    ended: float = 0.0

    @property
    def is_right(self) -> bool:
        """No wrong token, and all of them if it finished."""
        wanted = self.request.token_ids
        if self.ending != "finished":
            wanted = wanted[: len(self.token_ids)]
        return self.token_ids == wanted

    def __str__(self) -> str:
        num_tokens = f"{len(self.token_ids)}/{len(self.request.token_ids)} tokens"
        return f"{self.ending} {self.message} ({num_tokens}{'' if self.is_right else ', WRONG'})"


# --- clients -------------------------------------------------------------------------------------


def patient_session(url: str) -> aiohttp.ClientSession:
    """Any number of connections, each for one request; nothing waits for ever."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=GIVE_UP_S)
    return aiohttp.ClientSession(url, connector=connector, timeout=timeout)


async def watch(
    session: aiohttp.ClientSession,
    request: KnownRequest,
    *,
    dp_rank: int | None = None,
    stream: bool = True,
    on_tokens: Callable[[], object] = lambda: None,
    pause_s: float = 0.0,
    leave_after: int | None = None,
) -> Sighting:
    """Send a request and look at what comes. Raises nothing, whatever the server does.

    `dp_rank` pins it to a replica. `on_tokens` is called for each event of a stream with tokens.
    A slow reader pauses after each of them, an impatient one hangs up after `leave_after`.
    """
    sighting = Sighting(request)
    headers = {} if dp_rank is None else {"X-data-parallel-rank": str(dp_rank)}
    body = {**request.body, "stream": stream}
    try:
        async with session.post("/v1/completions", json=body, headers=headers) as response:
            if response.status != 200:
                refused = "Retry-After" in response.headers
                sighting.ending = "refused" if refused else "error"
                sighting.message = (await response.json())["error"]["message"]
            elif stream:
                async with aclosing(_token_events(response, sighting)) as events:
                    async for num_events in events:
                        on_tokens()
                        if num_events == leave_after:
                            sighting.ending = "left"
                            break
                        await asyncio.sleep(pause_s)
            else:
                choice = (await response.json())["choices"][0]
                sighting.token_ids, sighting.ending = choice["token_ids"], "finished"
    except aiohttp.ClientConnectorError as error:
        sighting.ending, sighting.message = "unreachable", str(error)
    except TimeoutError:
        sighting.ending = "hung"
    except (aiohttp.ClientError, ConnectionError) as error:
        sighting.ending, sighting.message = "reset", f"{type(error).__name__}: {error}"
    sighting.ended = time.monotonic()
    return sighting


async def _token_events(
    response: aiohttp.ClientResponse, sighting: Sighting
) -> AsyncGenerator[int, None]:
    """Note what comes, up to the end, which is well only with a [DONE]; counts token events."""
    ending: Ending = "reset"
    num_events = 0
    async for line in response.content:
        if line.strip() == b"data: [DONE]":
            sighting.ending = ending
            return
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            ending, sighting.message = "error", event["error"]["message"]
            continue
        choice = event["choices"][0]
        sighting.token_ids += choice["token_ids"]
        sighting.last_token = time.monotonic()
        if choice["finish_reason"] is not None:
            ending = "finished"
        num_events += 1
        yield num_events
    sighting.ending, sighting.message = "reset", "the stream ended without [DONE]"


# --- requests whose tokens are known -------------------------------------------------------------


async def known_requests(num_requests: int, max_tokens: int) -> list[KnownRequest]:
    """From one rank alone, each request by itself. Requests with ties are left out, so that any
    layout must give the same tokens."""
    with Launch("--model", str(STORIES)) as launch:
        async with aiohttp.ClientSession(launch.wait_ready()) as session:
            return await draw_requests(session, num_requests, max_tokens, random.Random(7))


async def draw_requests(
    session: aiohttp.ClientSession, num_requests: int, max_tokens: int, chance: random.Random
) -> list[KnownRequest]:
    """What this server gives when it has nothing else to do."""
    known: list[KnownRequest] = []
    while len(known) < num_requests:
        prompt = [1, *(chance.randrange(3, 512) for _ in range(chance.randrange(2, 40)))]
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await post(session, "/v1/completions", {**body, "logprobs": 2})
        choice = answer["choices"][0]
        if not _has_tie(choice["logprobs"]["top_logprobs"]):
            known.append(KnownRequest(body, choice["token_ids"]))
    return known


def _has_tie(top_logprobs: list[dict[str, float]]) -> bool:
    for by_token in top_logprobs:
        best = sorted(by_token.values(), reverse=True)[:2]
        if len(best) == 2 and best[0] - best[1] < TIE_GAP:
            return True
    return False
