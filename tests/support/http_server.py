"""The HTTP API on a real socket, in front of fake leaders."""

import io
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from support.fake_leaders import FakeLeader, front_end_with_leaders
from support.mailbox import LIMIT_S, settle
from support.tiny_model import ids, served_model

from aioengine.api.context import Api
from aioengine.api.server import HttpServer
from aioengine.config import EngineConfig
from aioengine.control.walltime import NO_END, Walltime
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.text import TextPool
from aioengine.frontend.tracer import Tracer
from aioengine.handshake_messages import Member
from aioengine.layout import ParallelLayout
from aioengine.messages import AddRequest, FinishReason

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = {"prompt": "hello"}
MESSAGES = {"messages": [{"role": "user", "content": "hello"}]}


@dataclass(frozen=True, slots=True)
class Answer:
    """A response, read."""

    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def error(self) -> Any:
        """OpenAI's form, checked."""
        (error,) = self.json.values()
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream, whose frame is checked."""
        assert self.headers["Content-Type"].startswith("text/event-stream")
        *events, done, end = self.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    api: Api
    front_end: FrontEnd
    leaders: list[FakeLeader]
    session: aiohttp.ClientSession

    @property
    def leader(self) -> FakeLeader:
        return self.leaders[0]

    async def get(self, path: str, **options: Any) -> Answer:
        return await self.ask("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        """`body`: an object, or bytes to be sent as they are."""
        is_raw = isinstance(body, bytes)
        sent = {"data": io.BytesIO(body)} if is_raw else {"json": body}
        return await self.ask("POST", path, **sent, **options)

    async def ask(self, method: str, path: str, **options: Any) -> Answer:
        async with self.session.request(method, path, **options) as response:
            return Answer(response.status, response.headers, await response.text())

    async def play(
        self, *texts: str, finish_reason: FinishReason = "length", count: int = 1, **fields: Any
    ) -> list[AddRequest]:
        """Wait for `count` requests and give each the texts, one step after the other."""
        added = await self.leader.added(count)
        for text in texts:
            for request in added:
                is_last = text is texts[-1]
                reason = finish_reason if is_last else None
                self.leader.answer(request, ids(text), reason, **fields)
            await settle()
        return added


@asynccontextmanager
async def serving(
    *,
    states: Sequence[str] = ("ready",),
    has_model: bool = True,
    walltime: Walltime = NO_END,
    members: Sequence[Member] = (),
    base: str | None = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """`states` of the replicas: starting, ready or failed. `members` are those to trace. `base` is
    the session's URL where the server's own is none that it could use."""
    limit = settings.pop("max_concurrent_requests", 200)
    front_end, leaders = front_end_with_leaders(len(states), limit, walltime=walltime)
    for leader, state in zip(leaders, states, strict=True):
        if state == "ready":
            leader.ready()
        elif state == "failed":
            leader.fail("its cause")
    text = TextPool()
    api = Api(
        config=EngineConfig(port=0, **settings),
        layout=ParallelLayout(dp_size=len(states)),
        front_end=front_end,
        tracer=Tracer(members, 0, b"key"),
        text=text,
        started_at=int(time.time()),
        model=served_model() if has_model else None,
    )
    server = HttpServer(api)
    try:
        url = await server.open()
        async with aiohttp.ClientSession(
            base or url.removesuffix(api.config.root_path),
            timeout=aiohttp.ClientTimeout(total=LIMIT_S),
        ) as session:
            await settle()
            yield Served(url, api, front_end, leaders, session)
            front_end.end_streams("the test is over")
    finally:
        await server.close()
        text._pool.shutdown()
