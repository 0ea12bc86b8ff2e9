"""The HTTP side of a rank with a front end, from the first moment to the end of the drain."""

import asyncio
import logging
import random
import resource
import time
from typing import Final

from aioengine.api.context import Api
from aioengine.api.server import HttpServer
from aioengine.checkpoint.source import ModelSource
from aioengine.control.deadline import wait_first
from aioengine.control.signals import Signals
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.text import TextPool
from aioengine.frontend.tracer import Tracer
from aioengine.limits import MAX_CONNECTIONS
from aioengine.model_config import ModelConfig
from aioengine.rank.model_files import load_text
from aioengine.rank.place import Place

log = logging.getLogger(__name__)

OTHER_FILES: Final = 1024
"""Descriptors that are no connections of clients."""


class HttpService:
    """Serves one front end until the drain is over or no replica is left."""

    def __init__(
        self,
        place: Place,
        front_end: FrontEnd,
        tracer: Tracer,
        signals: Signals,
        model: ModelConfig,
        source: ModelSource,
    ) -> None:
        self._place = place
        self._front_end = front_end
        self._tracer = tracer
        self._signals = signals
        self._model = model
        self._source = source
        self._text = TextPool()

    async def run(self) -> None:
        """Raises StartupError when the text side of the model cannot be loaded."""
        place, front_end = self._place, self._front_end
        api = Api(
            config=place.config,
            layout=place.layout,
            front_end=front_end,
            tracer=self._tracer,
            text=self._text,
            started_at=int(time.time()),
            seeds=random.Random(place.config.seed),
        )
        _raise_file_limit()
        server = HttpServer(api, place.layout.coords(place.rank).dp)
        # Leaders hear from this front end until it has told them to end.
        async with asyncio.TaskGroup() as tasks:
            beats = tasks.create_task(front_end.run_heartbeats(), name="heartbeats")
            limit = tasks.create_task(
                front_end.limit_start(place.startup), name="limit of the start-up"
            )
            walltime = tasks.create_task(self._watch_walltime(), name="walltime")
            try:
                url = await server.open()
                log.info("HTTP at %s (answers 503 until ready)", url)
                api.model = await load_text(place, self._model, self._source, self._text)
                front_end.start()
                await self._until_over(url, api.model.name)
            finally:
                await server.close()
            await front_end.shut_down()
            beats.cancel()
            limit.cancel()
            walltime.cancel()

    async def _watch_walltime(self) -> None:
        """Begin a drain when the job is about to end; not before ready, when other ranks might take
        the end of this one for a failure."""
        walltime = self._place.walltime
        await self._front_end.started.wait()
        while (until_drain_s := walltime.until_drain_s) is not None:
            if until_drain_s == 0:
                log.info("%s, so a drain begins (--walltime-margin)", walltime.cause)
                self._signals.request_drain(for_walltime=True)
                return
            log.info("%s; a drain begins %.0f s from now", walltime.cause, until_drain_s)
            await asyncio.sleep(until_drain_s)

    async def _until_over(self, url: str, model_name: str) -> None:
        signals, front_end = self._signals, self._front_end
        await wait_first(front_end.started, front_end.all_failed, signals.first)
        if front_end.started.is_set():
            log.info("ready: %s at %s", model_name, url)
        await wait_first(front_end.all_failed, front_end.drain_requested, signals.first)
        if front_end.all_failed.is_set():
            return
        signals.request_drain(for_walltime=front_end.drain_is_for_walltime)
        limit_s = self._begin_drain()
        await wait_first(front_end.idle, front_end.all_failed, signals.drain_over, limit_s=limit_s)
        if front_end.num_live:
            log.warning("the time for draining is over: %d requests cut off", front_end.num_live)
        cause = front_end.drain_cause or "the server is shutting down"
        front_end.end_streams(cause)
        front_end.end_calls(cause)

    def _begin_drain(self) -> float:
        """Returns the seconds that requests in flight get."""
        front_end, signals = self._front_end, self._signals
        left_s = self._place.walltime.left_s if signals.is_for_walltime else None
        limit_s = signals.drain_limit_s if left_s is None else left_s
        front_end.begin_drain(for_walltime=signals.is_for_walltime)
        log.info(
            "draining: %d requests in flight get %.0f s%s",
            front_end.num_live,
            limit_s,
            f" ({front_end.drain_cause})" if front_end.drain_cause else "",
        )
        return limit_s


def _raise_file_limit() -> None:
    """To what connections may need: many systems give 1,024 descriptors to who does not ask."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_CONNECTIONS + OTHER_FILES
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
