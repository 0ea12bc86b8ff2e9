"""`python -m aioengine.launch`: one rank of a launch.

Environment → configuration → layout → control channel → HTTP (front end) → device, groups,
weights, KV cache → serve. The process ends by `os._exit`: once outputs are closed and the log is
flushed, nothing waits for a thread that may be stuck in a collective.
"""

import asyncio
import logging
import os
import random
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import setproctitle
import uvloop

from aioengine.api.app import HttpServer
from aioengine.api.context import Api
from aioengine.checkpoint.source import (
    ModelSource,
    read_model_config,
    resolve_model,
    resolve_tokenizer,
)
from aioengine.config import EngineConfig, refuse_unsupported
from aioengine.control.bootstrap import Bootstrap, Seat, run_in_daemon_thread
from aioengine.control.channel import Link, MemoryLink
from aioengine.control.signals import Signals
from aioengine.control.watch import Failure, Watch, kill_if_here
from aioengine.core.stages import split_layers
from aioengine.dist.launcher import (
    choose_interface,
    own_address,
    read_environment,
    report_to_launcher,
)
from aioengine.dist.launcher_env import LauncherEnv
from aioengine.dist.rendezvous import open_launcher_store
from aioengine.engine.device import DeviceThread
from aioengine.engine.leader import Leader
from aioengine.engine.peer import Peer
from aioengine.errors import EngineError, StartupError
from aioengine.flags import build_parser, parse_config
from aioengine.frontend.front_end import FrontEnd
from aioengine.frontend.text import ServedModel, TextPool, load_served_model
from aioengine.layout import ParallelLayout
from aioengine.limits import max_frame_bytes
from aioengine.messages import DrainRequested, Endpoint, Member, RankInfo, Roster
from aioengine.model_config import ModelConfig
from aioengine.worker.loading import check_checkpoint
from aioengine.worker.runner import Worker

log = logging.getLogger("aioengine.launch")

EXIT_OK = 0
EXIT_STARTUP = 1
EXIT_OWN_FAILURE = 70
EXIT_LOST_PEER = 71
BLAME_HOLD_S = 2.0
"""Survivors wait this long for the launcher's SIGTERM, so that it blames the rank that died."""


@dataclass(frozen=True, slots=True)
class Setup:
    """All that is known before the first other rank is met."""

    config: EngineConfig
    env: LauncherEnv
    layout: ParallelLayout
    source: ModelSource
    model: ModelConfig
    address: str

    @property
    def info(self) -> RankInfo:
        coords = str(self.layout.coords(self.env.rank))
        return RankInfo(self.env.rank, coords, socket.gethostname(), os.getpid())

    @property
    def is_leader(self) -> bool:
        return self.env.rank in self.layout.leaders

    @property
    def front_end_ranks(self) -> tuple[int, ...]:
        return tuple(self.layout.leaders) if self.config.api_ranks == "leaders" else (0,)

    @property
    def has_front_end(self) -> bool:
        return self.env.rank in self.front_end_ranks


@dataclass(slots=True)
class Links:
    """This rank's control links, by what is at the other end."""

    roster: Roster
    peers: dict[int, Link] = field(default_factory=dict)
    front_ends: dict[str, tuple[Link, RankInfo]] = field(default_factory=dict)
    leader: Link | None = None
    replicas: list[Link] = field(default_factory=list)
    """The front end's links to all leaders, by dp rank."""


def main() -> None:
    parser = build_parser("python -m aioengine.launch", "Run one rank of a launch.")
    try:
        setup = prepare(parse_config(parser, sys.argv[1:]))
    except (ValueError, EngineError) as error:
        print(f"aioengine: error: {error}", file=sys.stderr, flush=True)
        leave(EXIT_STARTUP)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        leave(runner.run(run_rank(setup)))


def leave(code: int) -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def prepare(config: EngineConfig) -> Setup:
    """Everything that can be wrong without meeting another rank. Raises ValueError."""
    env = read_environment(os.environ)
    refuse_unsupported(config)
    layout = ParallelLayout.fit(
        env.world_size,
        tp_size=config.tensor_parallel_size,
        pp_size=config.pipeline_parallel_size,
        dp_size=config.data_parallel_size,
    )
    source = resolve_model(config.model, config.startup_timeout_seconds)
    if source.hub_id is not None:  # with its commit, so that ranks of different ones are refused
        config = msgspec.structs.replace(config, model=str(source.hub_id))
    model = read_model_config(source)
    check_fits_model(config, model)
    check_checkpoint(source, model)
    setup = Setup(config, env, layout, source, model, own_address(env, config.host_ip))
    set_up_logging(setup)
    choose_interface(setup.address)
    setproctitle.setproctitle(f"aioengine {setup.info.coords} (rank {env.rank}/{env.world_size})")
    return setup


def check_fits_model(config: EngineConfig, model: ModelConfig) -> None:
    """ValueError for settings that the model cannot follow."""
    split_layers(model.num_layers, config.pipeline_parallel_size, config.stage_layers())
    if config.max_model_len is not None and config.max_model_len > model.max_position:
        raise ValueError(
            f"--max-model-len {config.max_model_len} is more than the {model.max_position} "
            f"positions that {model.name} was trained for"
        )


def set_up_logging(setup: Setup) -> None:
    """Every line carries rank and coordinates; stderr, and a file per rank with `--log-dir`."""
    config, info = setup.config, setup.info
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if config.log_dir is not None:
        directory = Path(config.log_dir)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            handlers.append(logging.FileHandler(directory / f"rank{info.rank}.log"))
        except OSError as error:
            raise ValueError(f"--log-dir {directory}: {error.strerror}") from None
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s.%(msecs)03d %(levelname)-7s [rank {info.rank} {info.coords}] "
        "%(message)s",
        datefmt="%H:%M:%S",
        handlers=handlers,
    )


async def run_rank(setup: Setup) -> int:
    """The whole life of this rank; returns the exit code."""
    signals = Signals(setup.config.shutdown_timeout, watch_parent=setup.env.kind != "none")
    rank = Rank(setup, signals)
    life = asyncio.current_task()
    assert life is not None
    signals.on_first = lambda: rank.on_drain_signal(life)
    signals.on_stuck_orphan = lambda: leave(EXIT_LOST_PEER)
    asyncio.get_running_loop().set_exception_handler(rank.on_loop_error)
    try:
        return await rank.live()
    except asyncio.CancelledError:
        log.info("stopped during start-up")
        return EXIT_OK
    except (EngineError, ExceptionGroup) as caught:
        error = innermost(caught)
        if isinstance(error, StartupError):
            log.error("%s", error)
            code = EXIT_STARTUP
        else:
            log.error("this rank failed", exc_info=error)
            code = EXIT_OWN_FAILURE
        report_to_launcher(setup.env, str(error))
        return code


def innermost(error: Exception) -> Exception:
    """The first exception inside nested groups."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def front_end_name(rank: int) -> str:
    """Unique in the launch: requests carry it in their ids."""
    return f"rank{rank}"


class Rank:
    """One rank: meets the others, runs its roles, and ends as the contract says."""

    def __init__(self, setup: Setup, signals: Signals) -> None:
        self._setup = setup
        self._signals = signals
        self._engine: Leader | Peer | None = None
        self._front_end: FrontEnd | None = None

    def on_drain_signal(self, life: "asyncio.Task[int]") -> None:
        """SIGTERM: before ready the rank just ends, later the front ends drain the launch."""
        if self._engine is None or not self._engine.is_ready:
            life.cancel()
        else:
            self._engine.request_drain(DrainRequested(self._setup.env.rank))

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback raised: whoever waits for what it should have done would wait for ever."""
        loop.default_exception_handler(context)
        if "handle" in context:
            report_to_launcher(self._setup.env, str(context["message"]))
            leave(EXIT_OWN_FAILURE)

    async def live(self) -> int:
        setup = self._setup
        self._log_place()
        links = await self._join()
        device = DeviceThread(asyncio.get_running_loop())
        worker = Worker(
            config=setup.config,
            layout=setup.layout,
            rank=setup.env.rank,
            local_rank=setup.env.local_rank,
            local_world_size=setup.env.local_world_size,
            omp_num_threads=setup.env.omp_num_threads,
            model_config=setup.model,
            source=setup.source,
        )
        async with asyncio.TaskGroup() as tasks:
            if setup.has_front_end:
                leaders = [links.roster.members[rank].info for rank in setup.layout.leaders]
                self._front_end = FrontEnd(
                    front_end_name(setup.env.rank),
                    list(zip(links.replicas, leaders, strict=True)),
                    max_concurrent_requests=setup.config.max_concurrent_requests,
                    heartbeat_seconds=setup.config.heartbeat_seconds,
                    on_frozen=self._on_frozen_leader,
                )
                tasks.create_task(self._serve(self._front_end), name="front end")
            running = tasks.create_task(self._run_engine(links, device, worker), name="engine")
        failure = running.result()
        if failure is None:
            log.info("ended in order")
            return EXIT_OK
        if failure.rank == setup.env.rank:
            assert self._engine is not None
            return EXIT_OWN_FAILURE if self._engine.is_ready else EXIT_STARTUP
        await self._hold_for_blame()
        return EXIT_LOST_PEER

    def _on_frozen_leader(self, leader: RankInfo) -> None:
        if self._setup.config.kill_frozen:
            kill_if_here(leader, self._setup.info.host)

    def _log_place(self) -> None:
        setup = self._setup
        coords = setup.layout.coords(setup.env.rank)
        log.info(
            "rank %d in world size %d is assigned as DP rank %d, PP rank %d, PCP rank %d, "
            "TP rank %d, EP rank N/A",
            setup.env.rank,
            setup.env.world_size,
            coords.dp,
            coords.pp,
            coords.pcp,
            coords.tp,
        )
        log.info("launcher: %s", " ".join((setup.env.kind, setup.env.echo)).strip())

    # --- meeting the others

    async def _join(self) -> Links:
        setup = self._setup
        store = None
        if setup.env.world_size > 1:
            store = await run_in_daemon_thread(
                open_launcher_store, setup.env, setup.config.startup_timeout_seconds
            )
        async with asyncio.TaskGroup() as tasks:
            bootstrap = Bootstrap(
                tasks,
                setup.config,
                rank=setup.env.rank,
                num_ranks=setup.env.world_size,
                job_secret=setup.env.job_secret,
                address=setup.address,
                max_frame_bytes=max_frame_bytes(
                    max_model_len=setup.config.max_model_len or setup.model.max_position,
                    max_num_batched_tokens=setup.config.max_num_batched_tokens,
                    num_slots=setup.config.num_slots,
                    block_size=setup.config.block_size,
                ),
            )
            try:
                roster = await bootstrap.join(store, self._entry, self._seats())
                return await self._connect(bootstrap, roster)
            finally:
                bootstrap.close()

    def _entry(self, endpoint: Endpoint | None) -> Member:
        config = msgspec.json.encode(self._setup.config)
        return Member(
            info=self._setup.info, node=self._setup.env.node, endpoint=endpoint, config=config
        )

    def _seats(self) -> list[Seat]:
        """Who will dial this rank, when it leads."""
        setup = self._setup
        if not setup.is_leader:
            return []
        peers: list[Seat] = [("peer", rank) for rank in self._peer_ranks()]
        return [*peers, *(("front_end", rank) for rank in self._other_front_ends())]

    def _other_front_ends(self) -> list[int]:
        setup = self._setup
        return [rank for rank in setup.front_end_ranks if rank != setup.env.rank]

    def _peer_ranks(self) -> range:
        return self._setup.layout.replica(self._setup.env.rank)[1:]

    async def _connect(self, bootstrap: Bootstrap, roster: Roster) -> Links:
        """Dial the leaders that this rank talks to, and wait for those that dial it."""
        setup = self._setup
        links = Links(roster)
        rank = setup.env.rank
        if not setup.is_leader:
            leader = roster.members[setup.layout.leader_of(rank)]
            links.leader = await bootstrap.dial(leader, "peer")
            return links
        if setup.has_front_end:
            for leader_rank in setup.layout.leaders:
                if leader_rank == rank:
                    own_end, far_end = MemoryLink.pair(asyncio.get_running_loop())
                    links.replicas.append(own_end)
                    links.front_ends[front_end_name(rank)] = (far_end, setup.info)
                else:
                    leader = roster.members[leader_rank]
                    links.replicas.append(await bootstrap.dial(leader, "front_end"))
        for carrier in self._other_front_ends():
            connection = await bootstrap.accept("front_end", carrier)
            info = roster.members[carrier].info
            links.front_ends[front_end_name(carrier)] = (connection, info)
        for peer in self._peer_ranks():
            links.peers[peer] = await bootstrap.accept("peer", peer)
        return links

    # --- roles

    async def _run_engine(
        self, links: Links, device: DeviceThread, worker: Worker
    ) -> Failure | None:
        """Lead or follow until the end; None when it was in order."""
        setup = self._setup
        infos = {member.info.rank: member.info for member in links.roster.members}
        if links.leader is None:
            watch = self._watch({rank: infos[rank] for rank in links.peers})
            self._engine = Leader(
                setup.config,
                setup.model,
                watch,
                device,
                worker,
                links.peers,
                links.front_ends,
                setup.address,
            )
        else:
            leader_rank = setup.layout.leader_of(setup.env.rank)
            watch = self._watch({leader_rank: infos[leader_rank]})
            self._engine = Peer(setup.config, watch, leader_rank, links.leader, device, worker)
        failure = await self._engine.run()
        if failure is not None:
            log.error("first failure: %s", failure.cause)
            report_to_launcher(setup.env, f"ended because of {failure.cause}")
            if self._front_end is not None and self._front_end.health != "failed":
                self._signals.request_drain()  # the streams of other replicas may end
        return failure

    def _watch(self, others: dict[int, RankInfo]) -> Watch:
        config = self._setup.config
        return Watch(
            self._setup.info,
            others,
            heartbeat_seconds=config.heartbeat_seconds,
            kill_frozen=config.kill_frozen,
        )

    async def _serve(self, front_end: FrontEnd) -> None:
        """HTTP from the first moment, until the drain is over or no replica is left."""
        setup = self._setup
        text = TextPool()
        api = Api(
            config=setup.config,
            layout=setup.layout,
            front_end=front_end,
            text=text,
            started_at=int(time.time()),
            seeds=random.Random(setup.config.seed),
        )
        server = HttpServer(api, setup.layout.coords(setup.env.rank).dp)
        # Leaders hear from this front end until it has told them to end.
        async with asyncio.TaskGroup() as tasks:
            beats = tasks.create_task(front_end.run_heartbeats(), name="heartbeats")
            try:
                url = await server.open()
                log.info("HTTP at %s (answers 503 until ready)", url)
                api.model = await self._load_text(text)
                front_end.start()
                await self._until_over(front_end, url, api.model.name)
            finally:
                await server.close()
            await front_end.shut_down()
            beats.cancel()

    async def _load_text(self, text: TextPool) -> ServedModel:
        setup = self._setup
        try:
            tokenizer = await text.run(
                resolve_tokenizer,
                setup.config.tokenizer,
                setup.source,
                setup.config.startup_timeout_seconds,
            )
            return await text.run(
                load_served_model,
                setup.model,
                tokenizer,
                name=setup.config.served_model_name,
                template_file=setup.config.chat_template,
            )
        except ValueError as error:
            raise StartupError(str(error)) from None

    async def _until_over(self, front_end: FrontEnd, url: str, model_name: str) -> None:
        signals = self._signals
        await wait_first(front_end.started, front_end.all_failed, signals.first)
        if front_end.started.is_set():
            log.info("ready: %s at %s", model_name, url)
        await wait_first(front_end.all_failed, front_end.drain_requested, signals.first)
        if front_end.all_failed.is_set():
            return
        signals.request_drain()
        front_end.begin_drain()
        log.info("draining: %d requests in flight", front_end.num_live)
        await wait_first(
            front_end.idle, front_end.all_failed, signals.second, limit_s=signals.drain_limit_s
        )
        if front_end.num_live:
            log.warning("the time for draining is over: %d requests cut off", front_end.num_live)
        front_end.end_streams("the server is shutting down")

    async def _hold_for_blame(self) -> None:
        if self._setup.env.kind != "none":
            await wait_first(self._signals.first, limit_s=BLAME_HOLD_S)


async def wait_first(*events: asyncio.Event, limit_s: float | None = None) -> None:
    """Return when one of the events is set, or the limit is over."""
    async with asyncio.TaskGroup() as tasks:
        waits = [tasks.create_task(event.wait()) for event in events]
        await asyncio.wait(waits, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()


if __name__ == "__main__":
    main()
