"""Clients that look closely: what each sees of its request, right or wrong."""

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Literal

import aiohttp
from support.known_requests import KnownRequest

NUM_EVENTS_STARTED: Final = 5
"""Every stream has got so many once `Streams` have started."""
GIVE_UP_S: Final = 120.0
"""For any request: what takes longer counts as hung."""

Ending = Literal["finished", "left", "error", "refused", "reset", "unreachable", "hung"]
"""`left` by the client itself; `error` an error event of a stream, or a status that is none of
these; `refused` a 503 with Retry-After; `reset` a connection that ended in the middle."""


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


def summary(seen: Iterable[Sighting]) -> str:
    """Such as "3 finished, 1 reset after a WRONG token"."""
    words = (s.ending if s.is_right else f"{s.ending} after a WRONG token" for s in seen)
    return ", ".join(f"{number} {what}" for what, number in Counter(words).items())


# --- clients -------------------------------------------------------------------------------------


def patient_session(url: str, *, buffer_bytes: int = 2**16) -> aiohttp.ClientSession:
    """Any number of connections, each for one request; nothing waits for ever.

    With a small buffer, what a slow reader has not read stays with the server.
    """

    def make_socket(address: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, _ = address
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        return made

    connector = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=make_socket)
    timeout = aiohttp.ClientTimeout(total=GIVE_UP_S)
    return aiohttp.ClientSession(
        url, connector=connector, timeout=timeout, read_bufsize=buffer_bytes
    )


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


class Streams:
    """Streams on both replicas, all of them under way once the context is entered."""

    def __init__(self, session: aiohttp.ClientSession, requests: Sequence[KnownRequest]) -> None:
        self._session = session
        self._requests = requests
        self._num_to_start = 2 * len(requests)
        self._started = asyncio.Event()
        self._running: dict[int, list[asyncio.Task[Sighting]]] = {0: [], 1: []}

    async def start(self, tasks: asyncio.TaskGroup) -> None:
        for dp_rank, running in self._running.items():
            for request in self._requests:
                watching = self._watch(request, dp_rank)
                running.append(tasks.create_task(watching))
        await self._started.wait()

    async def seen(self, dp_rank: int) -> list[Sighting]:
        """Of one replica's streams, once all of them have ended."""
        return [await task for task in self._running[dp_rank]]

    async def _watch(self, request: KnownRequest, dp_rank: int) -> Sighting:
        num_events = 0

        def count() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == NUM_EVENTS_STARTED:
                self._num_to_start -= 1
                if not self._num_to_start:
                    self._started.set()

        return await watch(self._session, request, dp_rank=dp_rank, on_tokens=count)
